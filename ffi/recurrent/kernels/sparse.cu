// Recurrent scans with sparse matrices in one cooperative launch (problem.h).
//
// A step of a block: wait for its part of the state and keep it in shared memory; multiply; hand
// the partial sums to the blocks that own the units (to itself without clusters); apply the
// pointwise step; publish. Loads of inputs and stores of results come behind that, where no block
// waits for them.
#include "persistent/backoff.cuh"
#include "persistent/delay.cuh"
#include "persistent/exchange.cuh"
#include "persistent/grid_barrier.cuh"
#include "recurrent/arrays.cuh"
#include "recurrent/kernels/sparse_product.cuh"
#include "recurrent/scan_of_block.cuh"

namespace jaxsparse {

// Sends partial sums to a block of the cluster. A barrier there counts their bytes, so that a block
// waits for its own sums only and not for a barrier of the cluster.
template <int kCount>
__device__ __forceinline__ void SendSums(uint32_t to, const float* sums, uint32_t barrier) {
  constexpr int kAtOnce = kCount < 4 ? kCount : 4;
  uint32_t words[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) words[i] = __float_as_uint(sums[i]);
  StoreAsync(to, words, barrier);
  if constexpr (kCount > 4) SendSums<kCount - 4>(to + 16, sums + 4, barrier);
}

// Whether all sums have come; false if the thread timed out.
__device__ __forceinline__ bool AwaitSums(uint64_t* barrier, uint32_t odd, Watchdog* watchdog) {
  watchdog->Begin();
  while (!TryWaitOfCluster(barrier, odd)) {
    if (watchdog->TimesOut()) return false;
  }
  return true;
}

// Threads of a block's first warps wait for the state and multiply; those of the warps behind them
// make the pointwise step of items (unit, batch entry): they add up, apply it, publish, and have
// the whole wait for the next state to load inputs and store results. Here: the items of one
// thread.
template <typename Step, typename Plan>
class PointwiseStep {
 public:
  using State = typename Plan::State;
  using Arrays = ScanArrays<Step, Plan>;
  static constexpr SparseSizes kSizes = Plan::kSizes;
  static constexpr SparseShape kShape = kSizes.form.shape;
  static constexpr int kUnits = kShape.units;
  static constexpr int kWidth = kSizes.width;
  static constexpr int kPerThread =
      (kSizes.items + kSizes.pointwise_threads - 1) / kSizes.pointwise_threads;

  // Items are numbered by (piece, unit, batch entry in the piece), the last fastest: their order in
  // the exchange buffer, so that neighbouring threads publish neighbouring words.
  __device__ PointwiseStep(const RecurrentScanProblem& p, const uint32_t* record, int thread)
      : thread_(thread), exchange_(static_cast<unsigned char*>(ExchangeOf<Plan>(p))) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      const int item = c * kSizes.pointwise_threads + thread;
      const bool exists = item < kSizes.items;
      const int i = exists ? item / kWidth % kUnits : 0;
      const int piece = exists ? item / (kWidth * kUnits) : 0;
      batch_entry_[c] = piece * kWidth + item % kWidth;
      const uint32_t unit = record[i];  // -1, or what there is not, is padding
      unit_[c] =
          exists && batch_entry_[c] < p.batch && unit < p.hidden ? static_cast<int>(unit) : -1;
      place_[c] = exists ? piece * (kSizes.slice / static_cast<int>(sizeof(State))) +
                               (BlockOfScan<Plan>() * kUnits + i) * kWidth + item % kWidth
                         : -1;
#pragma unroll
      for (int g = 0; g < Step::kProducts; ++g) {
        const auto sum_at = [&](int row) {
          return static_cast<int>(
              Within(record[kShape.rows_at() + g * kUnits + row], kSizes.form.partial_sums + 1));
        };
        first_sum_[c][g] = sum_at(i);
        sum_count_[c][g] = sum_at(i + 1) - first_sum_[c][g];
      }
      if (unit_[c] >= 0) Arrays::LoadCarry(p, batch_entry_[c], unit_[c], carry_[c]);
      const auto* initial = static_cast<const State*>(p.initial_state) +
                            RowOf<Plan>(p, batch_entry_[c]) * Step::kStates * p.hidden + unit_[c];
#pragma unroll
      for (int s = 0; s < Step::kStates; ++s) {
        state_[c][s] = unit_[c] >= 0 ? ToAccumulator(initial[s * p.hidden]) : 0.0f;
      }
    }
    Publish(0);
    LoadInputs(p, 0);
  }

  // `sums`: the partial sums that this block has received.
  __device__ __forceinline__ void Apply(const float* sums, bool is_bad) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      float products[Step::kProducts], input[Arrays::kInputSlots];
#pragma unroll
      for (int g = 0; g < Step::kProducts; ++g) {
        products[g] =
            SumOfRow(sums + first_sum_[c][g] * kSizes.batch + batch_entry_[c], sum_count_[c][g]);
      }
      Arrays::ConvertInputs(input_[c], 0, input);
      Step::Apply(products, carry_[c], input, state_[c], output_[c]);
      if (is_bad) {
#pragma unroll
        for (int s = 0; s < Step::kStates; ++s) state_[c][s] = __uint_as_float(0x7fffffffu);
#pragma unroll
        for (int o = 0; o < Step::kOutputs; ++o) output_[c][o] = __uint_as_float(0x7fffffffu);
#pragma unroll
        for (int k = 0; k < Step::kCarries; ++k) carry_[c][k] = __uint_as_float(0x7fffffffu);
      }
      // What no unit or batch entry stands behind is published as zero.
      if (unit_[c] < 0) {
#pragma unroll
        for (int s = 0; s < Step::kStates; ++s) state_[c][s] = 0.0f;
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void Publish(int64_t slot) {
    auto* words = reinterpret_cast<uint32_t*>(exchange_ + slot * kSizes.slot);
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
#pragma unroll
      for (int s = 0; s < Step::kStates; ++s) {
        const int at = place_[c] + s * kShape.places() * kWidth;
        if constexpr (sizeof(State) == 4) {
          if (place_[c] >= 0) StoreRelaxed(words + at, ToWord(state_[c][s]));
        } else {
          // Batch entries 2i and 2i + 1 belong to neighbouring threads.
          const float next = __shfl_down_sync(kAllLanes, state_[c][s], 1);
          if (place_[c] >= 0 && thread_ % 2 == 0) {
            StoreRelaxed(words + at / 2, ToWord<State>(state_[c][s], next));
          }
        }
      }
    }
  }

  // A long scan's exchange buffer does not stay in the L2 cache from when it was cleared.
  __device__ __forceinline__ void Prefetch(const RecurrentScanProblem& p, int64_t step) const {
    const unsigned char* from = exchange_ + step * kSizes.slot;
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      if (unit_[c] < 0) continue;
      Arrays::PrefetchInputs(p, Arrays::TimeOf(p, step), batch_entry_[c], unit_[c]);
#pragma unroll
      for (int s = 0; s < Step::kStates; ++s) {
        const int at = place_[c] + s * kShape.places() * kWidth;
        PrefetchToL2(from + at * sizeof(State));
      }
    }
  }

  __device__ __forceinline__ void LoadInputs(const RecurrentScanProblem& p, int64_t step) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      if (unit_[c] < 0) continue;
      Arrays::LoadInputs(p, Arrays::TimeOf(p, step), batch_entry_[c], unit_[c], input_[c]);
    }
  }

  __device__ __forceinline__ void Store(const RecurrentScanProblem& p, int64_t step) {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      if (unit_[c] < 0) continue;
      Arrays::StoreResults(p, Arrays::TimeOf(p, step), batch_entry_[c], unit_[c], state_ + c,
                           output_ + c);
    }
  }

  __device__ void StoreCarries(const RecurrentScanProblem& p) const {
#pragma unroll
    for (int c = 0; c < kPerThread; ++c) {
      if (unit_[c] >= 0) Arrays::StoreCarry(p, batch_entry_[c], unit_[c], carry_[c]);
    }
  }

 private:
  // As a tree, whose depth is what the step waits for.
  template <int kFirst, int kTerms>
  __device__ __forceinline__ static float SumOf(const float* terms) {
    if constexpr (kTerms == 1) {
      return terms[kFirst];
    } else {
      return SumOf<kFirst, kTerms / 2>(terms) +
             SumOf<kFirst + kTerms / 2, kTerms - kTerms / 2>(terms);
    }
  }

  // Loads don't wait for each other, since the step waits for them; of a pattern with very long
  // rows only kAtOnce at a time, so that the code stays short.
  __device__ __forceinline__ static float SumOfRow(const float* from, int count) {
    constexpr int kAtOnce = kSizes.form.row_sums < 16 ? kSizes.form.row_sums : 16;
    float sum = 0.0f;
#pragma unroll 1
    for (int first = 0; first < kSizes.form.row_sums && (first == 0 || first < count);
         first += kAtOnce) {
      float terms[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        terms[i] = first + i < count ? from[(first + i) * kSizes.batch] : 0.0f;
      }
      sum += SumOf<0, kAtOnce>(terms);
    }
    return sum;
  }

  int thread_;
  unsigned char* exchange_;
  int unit_[kPerThread];  // -1: padding
  int batch_entry_[kPerThread], place_[kPerThread];
  int first_sum_[kPerThread][Step::kProducts], sum_count_[kPerThread][Step::kProducts];
  float carry_[kPerThread][Arrays::kCarrySlots] = {};
  uint32_t input_[kPerThread][Arrays::kInputSlots] = {};
  float state_[kPerThread][Step::kStates];
  float output_[kPerThread][Arrays::kOutputSlots];
};

template <typename Step, typename Plan>
__global__ void __launch_bounds__(Plan::kSizes.threads, 1)
    RecurrentScan(const __grid_constant__ RecurrentScanProblem p) {
  using Product = SparseProduct<Plan>;
  constexpr SparseSizes kSizes = Plan::kSizes;
  static_assert(kSizes.form.shape.products == Step::kProducts &&
                kSizes.form.shape.state_parts == Step::kStates &&
                kSizes.state_bytes == sizeof(typename Plan::State));
  constexpr SparseShape kShape = kSizes.form.shape;
  constexpr int kWorkers = kShape.threads;
  constexpr int kThreads = kSizes.threads;
  // Barriers. In variants with barriers all of a block's threads meet each time, since tools that
  // look for races lose track of barriers for some of them.
  constexpr int kStateIsThere = Plan::kBarrier ? kAllThreads : 1;
  constexpr int kSumsAreThere = Plan::kBarrier ? kAllThreads : 2;

  extern __shared__ __align__(16) unsigned char dynamic_shared[];
  static __shared__ uint64_t sums_came[2];  // barriers that count the bytes of sums
  static __shared__ int failed;

  const int thread = static_cast<int>(threadIdx.x);
  const int64_t number = DirectionOf<Plan>(p) * Plan::kBlocks + BlockOfScan<Plan>();
  const uint32_t* record = p.layout + number * kShape.words();
  const uint32_t state_shared = AddressOfShared(dynamic_shared);
  Watchdog watchdog(p.wait_limits);

  for (int i = thread; i < kSizes.pieces * kZeroBytes / 4; i += kThreads) {
    constexpr int kWordsOfZeros = kZeroBytes / 4;
    const int at = i / kWordsOfZeros * kSizes.shared_slice + kSizes.part_slice;
    *reinterpret_cast<uint32_t*>(dynamic_shared + at + i % kWordsOfZeros * 4) = 0;
  }
  if (thread == 0) {
    failed = 0;
    if constexpr (kSizes.clustered) {
      InitBarrier(&sums_came[0], 1);
      InitBarrier(&sums_came[1], 1);
    }
  }
  if constexpr (kSizes.clustered) {
    FenceInitsOfBarriers();
    ClusterBarrier();
  } else {
    __syncthreads();
  }

  if (thread < kWorkers) {
    const Product product(p, record, state_shared + kSizes.entries_at);
    constexpr int kSliceLoads = kSizes.part_slice / 16;
    const auto* slot = static_cast<const unsigned char*>(ExchangeOf<Plan>(p)) +
                       BlockOfScan<Plan>() % kShape.cluster * kSizes.part_slice;
    Backoff backoff(p.poll_delays);
    backoff.Start();
    for (int64_t step = 0; step < p.steps; ++step, slot += kSizes.slot) {
      const uint32_t set = static_cast<uint32_t>(step & 1);
      const uint32_t set_shared = state_shared + kSizes.sums_at + set * kSizes.set_bytes;
      const uint32_t came = AddressOfShared(&sums_came[set]);
      // What a block sends that didn't get all of its part of the state has to be NaN elsewhere,
      // too.
      float poison = 0.0f;
      auto send = [&]<int kCount>(int destination, int b, const float* v) {
        const uint32_t to =
            set_shared + (static_cast<uint32_t>(destination & 0xffff) * Plan::kSizes.batch + b) * 4;
        if constexpr (Plan::kSizes.clustered) {
          const uint32_t there = static_cast<uint32_t>(destination) >> 16;
          float sums[kCount];
#pragma unroll
          for (int i = 0; i < kCount; ++i) sums[i] = v[i] + poison;
          SendSums<kCount>(AddressOfRank(to, there), sums, AddressOfRank(came, there));
        } else {
#pragma unroll
          for (int i = 0; i < kCount; ++i) StoreShared(to + i * 4, v[i]);
        }
      };
      if constexpr (Plan::kBarrier) {
        WaitAt<kThreads>(kAllThreads);
        if (thread == 0) {
          MeetOtherBlocks<Plan::kBlocks>(ArrivalsOf<Plan>(p), step, &watchdog);
        }
        WaitAt<kThreads>(kAllThreads);
      } else {
        backoff.Wait();
      }
      Delay<Plan::kMostDelay>(step);
      const bool received = Receive<kWorkers, kSizes.pieces * kSliceLoads>(
          thread, &watchdog,
          [&](int i) {
            return reinterpret_cast<const Words4*>(slot + i / kSliceLoads * kSizes.slice) +
                   i % kSliceLoads;
          },
          [&](int i, Words4 w) {
            StoreShared(
                state_shared + i / kSliceLoads * Plan::kSizes.shared_slice + i % kSliceLoads * 16,
                w);
          });
      if (!received) failed = 1;
      __syncwarp();
      WaitAt<Plan::kBarrier ? kThreads : kWorkers>(kStateIsThere);
      if constexpr (kSizes.clustered) {
        if (*static_cast<volatile int*>(&failed) != 0) poison = __uint_as_float(0x7fffffffu);
      }
      product.FromShared(state_shared, send);
      // No thread writes the next state before all have multiplied this one.
      __syncwarp();
      WaitAt<kThreads>(kSumsAreThere);
      backoff.Adapt(__any_sync(kAllLanes, watchdog.TakeHasWaited()));
      backoff.Start();
    }
  } else {
    PointwiseStep<Step, Plan> pointwise(p, record, thread - kWorkers);
    const uint32_t bytes_expected = record[kShape.groups_at() - 1] * (kSizes.batch * 4);
    for (int64_t step = 0; step < p.steps; ++step) {
      const uint32_t set = static_cast<uint32_t>(step & 1);
      if constexpr (Plan::kBarrier) {
        WaitAt<kThreads>(kAllThreads);  // all have published
        WaitAt<kThreads>(kAllThreads);  // in all blocks
        WaitAt<kThreads>(kAllThreads);  // and the state is there
      }
      if constexpr (kSizes.clustered) {
        if (thread == kWorkers) ArriveAndExpect(&sums_came[set], bytes_expected);
      }
      __syncwarp();
      WaitAt<kThreads>(kSumsAreThere);
      if constexpr (kSizes.clustered) {
        const uint32_t phase = static_cast<uint32_t>(step >> 1 & 1);
        if (!AwaitSums(&sums_came[set], phase, &watchdog)) failed = 1;
      }
      Delay<Plan::kMostDelay>(step);
      const auto* sums =
          reinterpret_cast<const float*>(dynamic_shared + kSizes.sums_at + set * kSizes.set_bytes);
      pointwise.Apply(sums, *static_cast<volatile int*>(&failed) != 0);
      if (step + 1 < p.steps) {
        pointwise.Publish(step + 1);
        pointwise.LoadInputs(p, step + 1);
      }
      pointwise.Store(p, step);
      if (Plan::kPrefetch && step + kStepsAhead < p.steps) {
        pointwise.Prefetch(p, step + kStepsAhead);
      }
    }
    pointwise.StoreCarries(p);
  }
  // A block's shared memory has to outlive what its peers send there.
  __syncwarp();
  if constexpr (kSizes.clustered) ClusterBarrier();
}

}  // namespace jaxsparse
