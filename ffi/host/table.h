// A table of kernel variants, free of the standard library so that CPU kernels can define one.
#pragma once

namespace jaxsparse {

class Workers;

// A row of an operation's table of CPU variants (host/variant.h says how one is chosen).
template <typename Problem>
struct CpuVariant {
  const char* name;
  bool (*fits)(const Problem&);
  double (*cost)(const Problem&);
  void (*launch)(const Problem&, Workers&);
};

template <typename Row>
struct Table {
  const Row* rows;
  int count;
  const Row* begin() const { return rows; }
  const Row* end() const { return rows + count; }
};

template <typename Row, int kCount>
constexpr Table<Row> MakeTable(const Row (&rows)[kCount]) {
  return {rows, kCount};
}

}  // namespace jaxsparse
