// The layers of a stack in one launch, whose blocks send each other sums (wave_scatter.cuh). As in
// other waves (wave.cu), each layer or part of its batch has blocks and an exchange buffer of its
// own, and step t of a layer runs beside step t + 1 of the layer below.
#include "persistent/backoff.cuh"
#include "recurrent/kernels/wave_scatter_steps.cuh"

namespace jaxsparse {

template <typename Plan>
__device__ __forceinline__ void SendSums(const RecurrentWaveLayer& p,
                                         const RecurrentWaveLayer* above, Words4* shared,
                                         volatile uint32_t* stop) {
  constexpr auto kSizes = Plan::kSizes;
  const ScatteredMatrix<Plan, false> own({p.weights, p.weight_row_stride, p.weight_column_stride},
                                         shared + kSizes.weights_at / 16);
  const ScatteredMatrix<Plan, true> to_above(
      above == nullptr ? DenseWeights{} : above->below_weights,
      shared + kSizes.below_weights_at / 16);
  Watchdog watchdog(p.wait_limits);
  __syncwarp();
  for (int64_t step = 0; step <= p.steps; ++step) {
    WaitAt<kSizes.meeting_threads>(BarrierBefore(step));
    // Nothing is sent that doesn't stem from all of the last state: slots are used again only as
    // long as that holds. The other blocks time out by themselves.
    bool sends = __all_sync(kAllLanes, *stop == 0);
    // All of this block's warps have received what was sent for the step before.
    if (sends && threadIdx.x == 0 && step > 0) {
      StoreRelaxed(ProgressOf<Plan>(p) + BlockOfScan<Plan>(), static_cast<uint32_t>(step - 1));
    }
    __syncwarp();
    Delay<Plan::kMostDelay>(step);
    const bool is_above = above != nullptr && step > 0;
    const auto* states = StatesBefore<Plan>(shared, step);
    const auto needed = static_cast<int32_t>(step - 1 - kSizes.kBelowSlots);
    int32_t reached = 0x7fffffff;
    if (is_above) reached = to_above.ProgressOfReceiver(ProgressOf<Plan>(*above));
    if (sends && step < p.steps) {
      own.Send(states, MailboxOf<Plan>(p) + SlotOfMailbox<Plan, false>(step),
               LapOf<Plan, false>(step));
    }
    if (!is_above) continue;
    watchdog.Begin();
    while (sends && __any_sync(kAllLanes, reached < needed)) {
      if (reached < needed) reached = to_above.ProgressOfReceiver(ProgressOf<Plan>(*above));
      if (__any_sync(kAllLanes, watchdog.TimesOut())) sends = false;
    }
    if (!sends) {
      *stop = 1;
      continue;
    }
    to_above.Send(states, MailboxOf<Plan>(*above) + SlotOfMailbox<Plan, true>(step - 1),
                  LapOf<Plan, true>(step - 1));
  }
}

template <typename Step, typename Plan>
__device__ __forceinline__ void MakeScatteredSteps(const RecurrentWaveLayer& p, Words4* shared,
                                                   volatile uint32_t* stop) {
  constexpr auto kSizes = Plan::kSizes;
  ScatteredStep<Step, Plan> pointwise(p, StatesBefore<Plan>(shared, 0));
  Backoff backoff(p.poll_delays);
  const bool has_below = p.below_exchange != nullptr;
  __syncwarp();
  ArriveAt<kSizes.meeting_threads>(BarrierBefore(0));
  backoff.Start();
  bool stopped = false;
  for (int64_t step = 0; step < p.steps; ++step) {
    typename ScatteredStep<Step, Plan>::Sums sums = {};
    Delay<Plan::kMostDelay>(~step);
    bool received = !has_below || pointwise.template Receive<true>(step, sums);
    pointwise.TakeHasWaited();
    backoff.Wait();
    received = received && pointwise.template Receive<false>(step, sums);
    if (!received) *stop = 1;  // for the block's other warps
    __syncwarp();
    stopped = stopped || __any_sync(kAllLanes, *stop != 0);
    // A warp that waits no more for other blocks waits for the block's product warps instead, so
    // that it does not run ahead of them.
    pointwise.Run(step, sums, stopped, StatesBefore<Plan>(shared, step + 1), [&] {
      __syncwarp();
      if (stopped) {
        WaitAt<kSizes.meeting_threads>(BarrierBefore(step + 1));
      } else {
        ArriveAt<kSizes.meeting_threads>(BarrierBefore(step + 1));
      }
      backoff.Start();
    });
    backoff.Adapt(pointwise.TakeHasWaited());
  }
  pointwise.Finish();
}

template <typename Step, typename Plan>
__global__ void __launch_bounds__(Plan::kSizes.threads, Plan::kSizes.resident)
    RecurrentWaveScan(const __grid_constant__ RecurrentWave<Plan::kLayers> wave) {
  constexpr auto kSizes = Plan::kSizes;
  static_assert(kSizes.products == 1 && Step::kProducts == 1 &&
                kSizes.state_parts == Step::kStates &&
                kSizes.state_bytes == sizeof(typename Plan::State) && kSizes.gets_its_registers &&
                !kSizes.has_idle_warps && kSizes.has_whole_tiles);
  const int layer = LayerOfBlock<Plan>();
  const RecurrentWaveLayer& p = wave.layer[layer];
  const RecurrentWaveLayer* above = layer + 1 < Plan::kLayers ? &wave.layer[layer + 1] : nullptr;
  extern __shared__ __align__(1024) Words4 shared[];
  volatile uint32_t* stop = reinterpret_cast<uint32_t*>(shared);
  for (int i = threadIdx.x; i < kSizes.weights_at / 16; i += kSizes.threads) shared[i] = {};
  __syncthreads();
  if (threadIdx.x < kSizes.product_threads) {
    if constexpr (kSizes.product_registers > 0) TakeRegisters<kSizes.product_registers>();
    SendSums<Plan>(p, above, shared, stop);
  } else {
    if constexpr (kSizes.product_registers > 0) GiveUpRegisters<kSizes.pointwise_registers>();
    if (threadIdx.x < kSizes.meeting_threads) {
      MakeScatteredSteps<Step, Plan>(p, shared, stop);
    }
  }
}

}  // namespace jaxsparse
