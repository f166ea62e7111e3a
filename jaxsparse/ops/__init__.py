"""The operations: public functions, primitives and derivative rules. docs/design.md says where."""
