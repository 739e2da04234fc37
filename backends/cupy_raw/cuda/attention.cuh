// What both attention kernels end with: scores are in base 2, their warps' results meet in shared memory.
#pragma once
#include "primitives.cuh"

constexpr float kLowest = -3.0e38f, kLog2E = 1.4426950408889634f;

// Add up what the warps of a block left of the same rows: shared holds rows [warp][kHeld][kHeadDim], their maxima, their sums.
template <int kHeadDim, int kWarps, int kHeld>
__device__ __forceinline__ void add_up_warps(const float* shared, float* partial_rows, float2* partial_sums, size_t first_row, int num_rows) {
  const float *largest = shared + kWarps * kHeld * kHeadDim, *sums = largest + kWarps * kHeld;
  for (int i = threadIdx.x; i < num_rows * kHeadDim; i += kWarps * 32) {
    const int r = i / kHeadDim;
    float top = kLowest, sum = 0.0f, row = 0.0f;
    for (int w = 0; w < kWarps; w++) top = fmaxf(top, largest[w * kHeld + r]);
    for (int w = 0; w < kWarps; w++) {
      const float factor = exp2_fast(largest[w * kHeld + r] - top);
      sum = fmaf(sums[w * kHeld + r], factor, sum);
      row = fmaf(shared[(w * kHeld + r) * kHeadDim + i % kHeadDim], factor, row);
    }
    partial_rows[(first_row + r) * kHeadDim + i % kHeadDim] = row;
    if (i % kHeadDim == 0) partial_sums[first_row + r] = make_float2(top, sum);
  }
}
