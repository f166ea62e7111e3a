// The sizes, operands and results of a call, in files that a test in Python writes and reads.
#pragma once

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace jaxsparse {

using Bytes = std::vector<char>;

inline float* FloatsOf(Bytes& bytes) { return reinterpret_cast<float*>(bytes.data()); }

class CallFiles {
 public:
  std::vector<Bytes> operands, results;

  explicit CallFiles(const std::string& folder) : folder_(folder), sizes_(folder + "/sizes") {}

  int64_t Next() {
    int64_t size = -1;
    sizes_ >> size;
    return size;
  }

  // Of the sizes: how many operands and results there are, and of each result its bytes.
  void Read() {
    operands.resize(static_cast<size_t>(Next()));
    results.resize(static_cast<size_t>(Next()));
    for (Bytes& result : results) result.assign(static_cast<size_t>(Next()), 7);
    for (size_t i = 0; i < operands.size(); ++i) {
      std::ifstream stream(folder_ + "/operand" + std::to_string(i), std::ios::binary);
      operands[i] = Bytes(std::istreambuf_iterator<char>(stream), {});
    }
  }

  void Write() const {
    for (size_t i = 0; i < results.size(); ++i) {
      std::ofstream(folder_ + "/result" + std::to_string(i), std::ios::binary)
          .write(results[i].data(), static_cast<std::streamsize>(results[i].size()));
    }
  }

 private:
  const std::string folder_;
  std::ifstream sizes_;
};

}  // namespace jaxsparse
