// What the host decides for both kernels of attention by the rows of a pattern: how groups of lanes
// read vectors, which blocks have which rows, and where parts of long rows are summed up.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "attention/kernels/csr.h"
#include "host/variant.h"
#include "nvrtc/expression.h"

namespace jaxsparse {

// A kernel's numbers of blocks have 31 bits.
constexpr int64_t kMostCsrBlocks = (int64_t{1} << 31) - 1;

struct CsrTuning {
  int step;      // entries that a group reads at once, if it has as many lanes
  int accesses;  // of a lane to a vector, where it has as many for a group of the fewest lanes
};

// On tensor cores: what AttentionCsrConfig says of stages and blocks.
struct CsrTensorTuning {
  int stages, blocks;
};

// Those of a kernel, the fastest on an H200 of 1 or 2 stages and 4 to 8 blocks, of 1 stage and 2 to
// 5 blocks for what is longer: for tiles of one vector of 64 numbers, of two, and of more.
struct CsrTensorTunings {
  CsrTensorTuning of_64, of_128, of_more;

  const CsrTensorTuning& Of(int stage_bytes) const {
    constexpr int kOf64 = 16 * 128;  // bytes of 16 entries
    return stage_bytes <= kOf64 ? of_64 : stage_bytes <= 2 * kOf64 ? of_128 : of_more;
  }
};

// The tunings of a kernel by the bits of a number: the fastest on an H200 among steps of 2, 4 and 8
// with one access and steps of 4 with two. Those of float64 were not compared.
struct CsrTunings {
  CsrTuning of_16_bits, of_32_bits, of_64_bits;
  CsrTensorTunings on_tensor_cores;
  bool float16_on_tensor_cores;  // as bfloat16

  bool FitTensorCores(DType dtype) const {
    return dtype == DType::kBFloat16 || (dtype == DType::kFloat16 && float16_on_tensor_cores);
  }
  const CsrTuning& Of(DType dtype) const {
    const int64_t bytes = SizeOf(dtype);
    return bytes == 2 ? of_16_bits : bytes == 4 ? of_32_bits : of_64_bits;
  }
};

// How lanes read vectors of `size` numbers.
struct CsrVectors {
  int vector = 1;
  int64_t accesses = 0;

  // By accesses that are as wide as the size and the places of some arrays allow.
  CsrVectors(int64_t size, DType dtype, std::initializer_list<const Array*> arrays) {
    constexpr int64_t kWidest = 16;  // bytes
    uint64_t places = 0;
    for (const Array* array : arrays) places |= reinterpret_cast<uint64_t>(array->data);
    vector = static_cast<int>(kWidest / SizeOf(dtype));
    while (size % vector != 0 || places % static_cast<uint64_t>(vector * SizeOf(dtype)) != 0) {
      vector /= 2;
    }
    accesses = size / vector;
  }

  // Whether they are 64 numbers or 128, of 16 bits: then all lanes have as many accesses.
  bool FitTensorCores() const {
    return vector == 8 && (accesses == kCsrTensorLanes || accesses == 2 * kCsrTensorLanes);
  }
  int OfLane(int lanes) const {
    return static_cast<int>(std::max<int64_t>(CeilDivide(accesses, lanes), 1));
  }
};

// `heads`: of queries, keys and their cotangents; `values`: of values and those of the result.
inline AttentionCsrConfig CsrConfigOf(const CsrTunings& tunings, const CsrVectors& heads,
                                      const CsrVectors& values, const AttentionOperands& p) {
  constexpr int kFewestLanes = 4;
  const CsrTuning& tuning = tunings.Of(p.dtype);
  AttentionCsrConfig config;
  config.own_scores = heads.accesses * heads.vector * SizeOf(p.dtype) <= 16;
  config.on_tensor_cores = tunings.FitTensorCores(p.dtype) && values.FitTensorCores() &&
                           (config.own_scores || heads.FitTensorCores());
  const int64_t most =
      config.own_scores ? values.accesses : std::max(heads.accesses, values.accesses);
  config.lanes = config.on_tensor_cores
                     ? kCsrTensorLanes
                     : std::max(LanesFor(CeilDivide(most, tuning.accesses)), kFewestLanes);
  config.step = config.on_tensor_cores ? kCsrTensorStep : std::min(tuning.step, config.lanes);
  config.head_vector = heads.vector;
  config.head_vectors = heads.OfLane(config.HeadLanes());
  config.whole_heads = heads.accesses == int64_t{config.head_vectors} * config.HeadLanes();
  config.value_vector = values.vector;
  config.value_vectors = values.OfLane(config.lanes);
  config.whole_values = values.accesses == int64_t{config.value_vectors} * config.lanes;
  if (config.on_tensor_cores) {
    const CsrTensorTuning& of_tiles = tunings.on_tensor_cores.Of(config.StageBytes());
    config.stages = of_tiles.stages;
    config.blocks = of_tiles.blocks;
  }
  return config;
}

inline std::string CsrConfigExpression(const AttentionCsrConfig& config) {
  return ConfigExpression(
      "AttentionCsrConfig",
      {Field("lanes", config.lanes), Field("step", config.step),
       Field("head_vector", config.head_vector), Field("head_vectors", config.head_vectors),
       Field("value_vector", config.value_vector), Field("value_vectors", config.value_vectors),
       Field("whole_heads", config.whole_heads), Field("whole_values", config.whole_values),
       Field("own_scores", config.own_scores), Field("on_tensor_cores", config.on_tensor_cores),
       Field("stages", config.stages), Field("blocks", config.blocks),
       Field("in_pairs", config.in_pairs)});
}

// Numbers of a lane have registers. Places in a row have 32 bits.
inline bool FitsCsr(const AttentionOperands& p, const AttentionCsrConfig& config) {
  constexpr int kMostNumbers = 16;
  constexpr int64_t kMostBytes = int64_t{1} << 31;
  const int64_t row = p.groups * p.per_group * std::max(p.head_size, p.value_size);
  return p.has_pattern && !p.scores.Exist() && row * SizeOf(p.dtype) < kMostBytes &&
         config.head_vector * config.head_vectors <= kMostNumbers &&
         config.value_vector * config.value_vectors <= kMostNumbers;
}

// A pass over the rows of a pattern, and the bytes of workspace that it wants for counters and sums
// of parts. Without room for them no row is cut; nor where sums would take more than kMostSumBytes,
// which the program would have to have whatever variant it takes.
class CsrPassPlan {
  static constexpr int64_t kMostSumBytes = 64 << 20;

 public:
  // `heads`: of a batch entry. `numbers`: that an entry adds to.
  CsrPassPlan(const AttentionOperands& p, const MaskPattern& pattern, int64_t heads,
              int64_t numbers)
      : heads_(p.batch.count * heads),
        numbers_(numbers),
        number_bytes_(p.dtype == DType::kFloat64 ? 8 : 4) {
    // Heads of a group with patterns of their own would have other rows to cut.
    const bool cuts = heads == p.groups * p.per_group || pattern.per_group == 1;
    parts_ = cuts && pattern.nse > kCsrPart ? CeilDivide(pattern.nse, kCsrPart) : 0;
    const int64_t most = kMostSumBytes / (2 * number_bytes_);  // with counters
    if (heads_ * (numbers_ + 1) > most / std::max<int64_t>(parts_, 1)) parts_ = 0;
  }

  int64_t CounterBytes() const { return CeilDivide(heads_ * parts_ * 4, 16) * 16; }
  int64_t SumBytes() const {
    return CeilDivide(heads_ * parts_ * 2 * numbers_ * number_bytes_, 16) * 16;
  }
  int64_t Bytes() const { return CounterBytes() + SumBytes(); }

  // `counters` and `sums`: null where no row is to be cut.
  CsrPass Pass(const AttentionOperands& p, const MaskPattern& pattern,
               const AttentionCsrConfig& config, char* counters, char* sums) const {
    CsrPass pass;
    pass.heads = static_cast<uint32_t>(heads_);
    pass.blocks = static_cast<uint32_t>(BlocksOfHead(p, pattern, config));
    pass.parts = counters == nullptr ? 0 : static_cast<uint32_t>(parts_);
    pass.numbers = static_cast<uint32_t>(numbers_);
    pass.done = reinterpret_cast<uint32_t*>(counters);
    pass.sums = sums;
    return pass;
  }

  // Warps take some units each, where there are many: what is found out about a head serves all.
  int64_t BlocksOfHead(const AttentionOperands& p, const MaskPattern& pattern,
                       const AttentionCsrConfig& config) const {
    constexpr int64_t kWarpsAtOnce = 64, kMostUnits = 8;  // of a multiprocessor, of a warp
    const int64_t units = CeilDivide(pattern.rows, config.Groups()) + parts_;
    const int64_t turns = heads_ * units / (p.gpu.multiprocessors * kWarpsAtOnce);
    const int64_t of_warp = std::clamp<int64_t>(turns / 4, 1, kMostUnits);
    return CeilDivide(units, of_warp * (kCsrThreads / kWarp));
  }
  int64_t Blocks(const AttentionOperands& p, const MaskPattern& pattern,
                 const AttentionCsrConfig& config) const {
    return heads_ * BlocksOfHead(p, pattern, config);
  }

 private:
  int64_t heads_, numbers_, number_bytes_, parts_;
};

// A variant of either operation, of how it is configured, how many blocks it has, the bytes of its
// workspace, and the functions of CudaVariant that are its own.
template <typename Problem, AttentionCsrConfig (*kConfigOf)(const Problem&),
          LaunchShape (*kShape)(const Problem&), int64_t (*kBytes)(const Problem&)>
struct CsrVariant {
  static bool Fits(const Problem& p) {
    return FitsCsr(p, kConfigOf(p)) && kShape(p).blocks < kMostCsrBlocks;
  }
  static int64_t WorkspaceBytes(const Problem& p, bool) { return Fits(p) ? kBytes(p) : 0; }
  static constexpr CudaVariant<Problem> With(double (*cost)(const Problem&),
                                             KernelSource (*source)(const Problem&),
                                             const CudaKernel<Problem>* prologue,
                                             std::string (*launch)(const Problem&,
                                                                   const CudaLaunch&)) {
    return {"csr", Fits, cost, source, kShape, prologue, launch, WorkspaceBytes};
  }
};

// Microseconds on an H200 for so many passes over the entries of all heads, which gather both
// vectors of each, in sectors, or as many as their instructions take.
template <typename Problem>
double CsrMicroseconds(const Problem& p, const AttentionCsrConfig& config, double passes) {
  constexpr double kSector = 32, kMemoryBytes = 4.2e6;  // of a microsecond
  const double cache_bytes = config.on_tensor_cores ? 7.2e6 : 6.4e6;
  constexpr double kShare = 0.6;  // of its cycles in which a scheduler issues instructions
  constexpr double kLaneInstructions = kShare * 132 * 4 * kWarp * kClocksOfMicrosecond;
  constexpr double kOfNumber = 2, kOfAccess = 4, kOfEntry = 40, kOfTensorEntry = 200;
  const auto bytes = [&](int64_t size) {
    return kSector * std::ceil(static_cast<double>(size * SizeOf(p.dtype)) / kSector);
  };
  const auto instructions = [&](int64_t size, int vector) {
    if (config.on_tensor_cores) return static_cast<double>(size);
    return static_cast<double>(size) * (kOfNumber + kOfAccess / vector);
  };
  const double entries = static_cast<double>(p.batch.count * p.groups * p.per_group) *
                         static_cast<double>(p.pattern.nse);
  const double of_entry = config.on_tensor_cores ? kOfTensorEntry : kOfEntry;
  const double gathered = entries * (bytes(p.head_size) + bytes(p.value_size));
  const double issued = entries * (of_entry + instructions(p.head_size, config.head_vector) +
                                   instructions(p.value_size, config.value_vector));
  const auto positions = static_cast<double>(p.queries * p.per_group + p.keys);
  const double operands = static_cast<double>(p.batch.count * p.groups * SizeOf(p.dtype)) *
                          positions * static_cast<double>(p.head_size + p.value_size);
  return passes *
         std::max({gathered / cache_bytes, operands / kMemoryBytes, issued / kLaneInstructions});
}

}  // namespace jaxsparse
