// How the generic kernel of the softmax over stored entries is launched.
#pragma once

namespace jaxsparse {

constexpr int kSoftmaxGenericThreads = 128;  // of a block

}  // namespace jaxsparse
