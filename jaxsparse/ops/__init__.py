"""The operations: one file for each, its public function, primitive and derivative rules."""
