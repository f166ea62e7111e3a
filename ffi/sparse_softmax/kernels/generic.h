// How the generic kernel of the softmax over stored entries is configured, by the host, for the
// device.
#pragma once

namespace jaxsparse {

constexpr int kSoftmaxGenericThreads = 128;  // of a block

struct SparseSoftmaxGenericConfig {
  bool backward = false;
};

}  // namespace jaxsparse
