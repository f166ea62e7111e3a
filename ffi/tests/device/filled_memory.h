// Memory that a kernel finds filled by the kernel in front of it, which it may begin before. Until
// then it has numbers, as an earlier launch may have left there.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

namespace jaxsparse {

class FilledMemory {
 public:
  template <typename T>
  void Add(std::vector<T>& array, int byte) {
    Add(array.data(), array.size() * sizeof(T), byte);
  }
  template <typename T>
  void Add(T* at, size_t bytes, int byte) {
    if (bytes == 0) return;
    constexpr int kNumber = 0x3c;
    std::memset(static_cast<void*>(at), kNumber, bytes);
    regions_.push_back({at, bytes, byte});
  }
  // What the kernel in front does.
  void Fill() const {
    for (const Region& region : regions_) std::memset(region.at, region.byte, region.bytes);
  }

 private:
  struct Region {
    void* at;
    size_t bytes;
    int byte;
  };
  std::vector<Region> regions_;
};

}  // namespace jaxsparse
