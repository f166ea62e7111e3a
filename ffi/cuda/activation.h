// What an operation applies to its sums, for host and device.
#pragma once

namespace jaxsparse {

enum class Activation : int { kNone, kRelu, kGelu };

}  // namespace jaxsparse
