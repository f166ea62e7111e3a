// Tensor core kernel of the sparse-dense product: its configuration, launch, workspace, fit and
// cost.
#include "spmm/kernels/tensor_cores.h"

#include <algorithm>
#include <string>

#include "host/preparation.h"
#include "nvrtc/expression.h"
#include "nvrtc/tensor_map.h"
#include "spmm/spmm_cuda.h"

namespace jaxsparse {
namespace {

constexpr int kWidestTile = 128;  // columns

// How work is cut: a block multiplies by so many columns of x, in one of so many parts of the inner
// places.
struct Tiling {
  int columns, parts;
};

// Into how many parts the inner places of a tile may be split.
struct SplitK {
  int least, most;
};
constexpr SplitK kIfFaster{1, 8}, kUnsplit{1, 1}, kSplit{2, 8};

// Microseconds. Fitted to 104 figures of 26 problems, 32 to 128 columns, 1024 x 1024 to
// 12288 x 4096, 10 to 30 % stored, with tiles that are split and that are not, half of them within
// 1.5 % and all within 8 %.
struct Fit {
  int components, columns;
  double start;
  double step;         // by itself
  double step_stored;  // more, if all of its entries were stored
  double step_copies;  // more, if all multiprocessors have x copied at once
};
constexpr Fit kFits[] = {
    {.components = 3,
     .columns = 32,
     .start = 10.06,
     .step = 0.505,
     .step_stored = 0.898,
     .step_copies = 0.094},
    {.components = 3,
     .columns = 64,
     .start = 8.64,
     .step = 0.674,
     .step_stored = 0.636,
     .step_copies = 0},
    {.components = 3,
     .columns = 128,
     .start = 11.1,
     .step = 0.958,
     .step_stored = 0.605,
     .step_copies = 0.101},
    {.components = 1,
     .columns = 32,
     .start = 8.78,
     .step = 0.274,
     .step_stored = 0.535,
     .step_copies = 0.044},
    {.components = 1,
     .columns = 64,
     .start = 7.88,
     .step = 0.34,
     .step_stored = 0.521,
     .step_copies = 0.026},
    {.components = 1,
     .columns = 128,
     .start = 9.81,
     .step = 0.273,
     .step_stored = 0.88,
     .step_copies = 0.178},
};

// With the prologue, but for what it prepares. What another tile costs is fitted to layers of
// ResNet-50, of which 802,816 columns meet as few as 64 inner places.
double Microseconds(const SpmmProblem& p, const Tiling& tiling) {
  // A block writes what it has, and begins anew with the next tile; the blocks of a split one leave
  // their sums, and the last of them reads those of all.
  constexpr double kForEntries = 1.4e-7, kForTile = 3.5, kOfColumns = 0.02;
  constexpr double kForSplitting = 1.2, kForBlock = 2, kForSums = 0.0057;
  const double places =
      static_cast<double>(p.pattern.rows) * static_cast<double>(p.pattern.columns);
  const double density = places > 0 ? static_cast<double>(p.pattern.nse) / places : 0;
  const int64_t items = SpmmTilesOf(p, tiling.columns) * tiling.parts;
  const double busy =
      items < p.gpu.multiprocessors ? static_cast<double>(items) / p.gpu.multiprocessors : 1;
  const double waves =
      items > 0 ? static_cast<double>(CeilDivide(items, p.gpu.multiprocessors)) : 1;
  const double steps = waves * static_cast<double>(CeilDivide(SpmmStepsOf(p), tiling.parts));
  const bool splits = tiling.parts > 1;
  const double tile = kForTile + kOfColumns * tiling.columns + (splits ? kForBlock : 0);
  const double splitting =
      splits ? kForSplitting + kForSums * tiling.columns * (1 + tiling.parts) : 0;
  for (const Fit& fit : kFits) {
    if (fit.components != ComponentsOf(p.dtype) || fit.columns != tiling.columns) continue;
    return fit.start + steps * (fit.step + density * fit.step_stored + busy * fit.step_copies) +
           (waves - 1) * tile + splitting +
           static_cast<double>(p.batch.count * p.pattern.nse) * kForEntries;
  }
  return kCostByName;
}

Preparation PreparationOf(const SpmmProblem& p, int columns) {
  return SpmmPreparation(p, columns, ComponentsOf(p.dtype));
}

// Whether there is space for what is prepared, and for parts if tiles are split.
bool HasSpaceFor(const SpmmProblem& p, const Tiling& tiling) {
  const int64_t items = SpmmTilesOf(p, tiling.columns) * tiling.parts;
  const int64_t parts = tiling.parts == 1 ? 0 : items;
  return parts <= kSpmmMostParts && PreparationOf(p, tiling.columns).Bytes() + kSpmmArrivedBytes +
                                            SpmmPartsBytes(parts, tiling.columns) <=
                                        p.workspace.bytes;
}

// The most bytes that any tiling takes. Where x will lie is not known yet, so it is taken not to be
// aligned, and to need components.
template <const SplitK& kSplitK>
int64_t WorkspaceBytes(const SpmmProblem& p, bool is_asked_for) {
  if (p.dense_on_left || p.dtype == DType::kFloat64) return 0;
  int columns = 32;
  while (columns < kWidestTile && columns < p.n) columns *= 2;
  const int64_t parts = kSplitK.most == 1 ? 0 : kSplitK.most * SpmmTilesOf(p, columns);
  const Preparation prepared(p.batch, p.stored, p.pattern.columns, p.x, p.n, columns,
                             ComponentsOf(p.dtype));
  const int64_t bytes =
      prepared.Bytes() + kSpmmArrivedBytes +
      std::min(SpmmPartsBytes(parts, columns), SpmmPartsBytes(kSpmmMostParts, kWidestTile));
  return is_asked_for || PaysToPrepare(p.stored, bytes) ? bytes : 0;
}

template <const SplitK& kSplitK>
Tiling TilingOf(const SpmmProblem& p) {
  const int least = SpmmStepsOf(p) < kSplitK.least ? 1 : kSplitK.least;
  Tiling best{32, least};
  for (int columns = 32; columns == 32 || (columns <= kWidestTile && columns / 2 < p.n);
       columns *= 2) {
    for (int parts = least; parts <= kSplitK.most; ++parts) {
      const Tiling tiling{columns, parts};
      if (parts > 1 && (parts > SpmmStepsOf(p) || !HasSpaceFor(p, tiling))) break;
      if (Microseconds(p, tiling) < Microseconds(p, best)) best = tiling;
    }
  }
  return best;
}

std::string Expression(const SpmmTensorConfig& config) {
  return ConfigExpression("SpmmTensorConfig", {Field("columns", config.columns),
                                               Field("transposed", config.transposed)});
}

template <const SplitK& kSplitK>
KernelSource Source(const SpmmProblem& p) {
  const SpmmTensorConfig config{TilingOf<kSplitK>(p).columns, p.transposed};
  return {"spmm/kernels/tensor_cores.cu",
          KernelExpression("SpmmTensorCores",
                           {TypeName(p.dtype), TypeName(p.out_dtype), TypeName(p.stored.index_type),
                            TypeName(p.pattern.index_type), Expression(config)})};
}

template <const SplitK& kSplitK>
LaunchShape Shape(const SpmmProblem& p) {
  const auto [columns, parts] = TilingOf<kSplitK>(p);
  const SpmmTensorConfig config{columns};
  const int components = ComponentsOf(p.dtype);
  const int64_t tiles = SpmmTilesOf(p, columns), blocks = p.gpu.multiprocessors;
  return {parts > 1 ? tiles * parts : std::min(tiles, blocks), config.Threads(components),
          config.SharedBytes(components)};
}

template <const SplitK& kSplitK>
constexpr CudaKernel<SpmmProblem> kPrologue{
    [](const SpmmProblem& p) {
      const SpmmTensorConfig config{TilingOf<kSplitK>(p).columns};
      return KernelSource{
          "spmm/kernels/tensor_cores.cu",
          KernelExpression("SpmmPrepare",
                           {TypeName(p.dtype), TypeName(p.stored.index_type), Expression(config)})};
    },
    [](const SpmmProblem& p) {
      const auto [columns, parts] = TilingOf<kSplitK>(p);
      LaunchShape shape = PrepareShape(PreparationOf(p, columns));
      if (parts > 1 && shape.blocks == 0) shape.blocks = 1;  // no block has arrived yet
      return shape;
    }};

template <const SplitK& kSplitK>
std::string Launch(const SpmmProblem& p, const CudaLaunch& launch) {
  SpmmTensorProblem tensor{p};
  std::string reason;
  if (SpmmCopiesX(p, TilingOf<kSplitK>(p).columns)) {
    reason = EncodeTensorMap({p.x.data, OwnEntries(p.batch, p.x), p.pattern.columns, p.n},
                             &tensor.tiles_of_x);
  }
  return reason.empty() ? launch.With(&tensor) : reason;
}

// Warpgroups are what GPUs of this compute capability have. Places of 32 bits: the distance between
// two of them, or the complement of one, is one, too; so are those of starts.
template <const SplitK& kSplitK>
bool Fits(const SpmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  constexpr SpmmTensorConfig kLargest{kWidestTile};
  return !p.dense_on_left && p.dtype != DType::kFloat64 && p.pattern.nse < kMost - kWarp &&
         p.pattern.columns < kMost && p.gpu.compute_capability == 90 &&
         kLargest.SharedBytes(3) <= p.gpu.shared_bytes && IsBatchedAsOne(p.batch, p.stored) &&
         TileStarts(p.stored.rows, p.stored.columns).At(1, 0) < kMost &&
         HasSpaceFor(p, TilingOf<kSplitK>(p));
}

double Cost(const SpmmProblem& p) {
  const Tiling tiling = TilingOf<kIfFaster>(p);
  const Preparation prepared = PreparationOf(p, tiling.columns);
  constexpr double kToFindStarts = 1.4e-6;  // of an entry
  const double found = prepared.own_starts == 0 ? 0 : static_cast<double>(p.pattern.nse);
  return Microseconds(p, tiling) + found * kToFindStarts +
         static_cast<double>(prepared.ComponentsBytes()) / kComponentsBytes;
}

template <const SplitK& kSplitK>
constexpr SpmmVariant TensorCores(const char* name, double (*cost)(const SpmmProblem&)) {
  return {name,
          Fits<kSplitK>,
          cost,
          Source<kSplitK>,
          Shape<kSplitK>,
          &kPrologue<kSplitK>,
          Launch<kSplitK>,
          WorkspaceBytes<kSplitK>};
}

}  // namespace

extern constinit const SpmmVariant kSpmmTensorCores = TensorCores<kIfFaster>("tensor_cores", Cost);
extern constinit const SpmmVariant kSpmmTensorCoresUnsplit =
    TensorCores<kUnsplit>("tensor_cores_unsplit", kByName);
extern constinit const SpmmVariant kSpmmTensorCoresSplitK =
    TensorCores<kSplit>("tensor_cores_split_k", kByName);

}  // namespace jaxsparse
