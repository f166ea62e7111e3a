// How the softmax with rows in registers is configured, by the host, for the device.
#pragma once

#include "types.h"

namespace jaxsparse {

struct SparseSoftmaxRegistersConfig {
  int lanes = 1;    // that own a row
  int vectors = 1;  // of 16 bytes, in the registers of each of them
  bool backward = false;

  // Of a block: if a row has more lanes than a warp, it has no others.
  constexpr int Threads() const {
    constexpr int kThreads = 128;
    return lanes > kWarp ? lanes : kThreads;
  }
  // An owner is what owns one or several rows and meets at barriers: a warp or a block.
  constexpr int OwnerThreads() const { return lanes < kWarp ? kWarp : lanes; }
  constexpr int OwnerRows() const { return OwnerThreads() / lanes; }
  constexpr int Owners() const { return Threads() / OwnerThreads(); }  // of a block
};

}  // namespace jaxsparse
