// Sound calls of a target, and how they may be changed and stay sound.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "handlers/frame.h"
#include "host/registry.h"

namespace jaxsparse {

using Bounds = std::vector<std::pair<std::string, int64_t>>;  // attributes and numbers

struct Sound {
  std::string name;
  TestCall call;
  // What may be left out at the end; have another dtype, as "out float32"; or, as no other array
  // has it, another size of a dimension counted from the end, as "x 1".
  std::set<std::string> optional = {}, free_dtype = {}, free_size = {};
  std::vector<int64_t> batch = {};  // operands may have 1 in place of each
  // Attributes out of range.
  Bounds out_of_range = {};
  bool for_cpu = true;  // else CPUs refuse the call itself, and whatever is changed in it
  std::vector<TestCall> empty = {};  // as declared, but there is nothing to do

  bool MayHave(const TestArray& array, size_t dimension, int64_t size) const {
    const std::string name = array.name;
    if (name == "tile_starts" ? size == 1 : name == "row_cuts" && size % 2 == 0) return true;
    if (name == "workspace") return size >= array.shape[0] && size < kMostBytes;
    return dimension < batch.size() && (size == 1 || size == batch[dimension]);
  }
};

struct Target {
  OperationEntry entry;
  std::vector<Sound> calls;
};

}  // namespace jaxsparse
