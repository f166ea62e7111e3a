// What host and device share of the generic kernel of the softmax over stored entries.
#pragma once

namespace jaxsparse {

constexpr int kSoftmaxGenericThreads = 128;  // of a block

}  // namespace jaxsparse
