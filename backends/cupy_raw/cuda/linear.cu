// Products of a few rows with a weight in groups of 32 inputs: int8 codes with a scale, or 4-bit codes with scale and minimum.
//
// | version                                                  | registers sm_90 | H200, 1 x 4096 x 14336 int4 |
// |----------------------------------------------------------|-----------------|-----------------------------|
// | this: a warp per output, 16 bytes of codes a lane a step | see budget_cuda.json |                             |
//
// Decoding reads every weight once, so bandwidth decides: nothing but codes and scales comes from memory, x from cache.
#include "primitives.cuh"

#ifndef IN
#error "IN, OUT, BITS (8 or 4), TOKENS (1, 2, 4, 8) specialise this file"
#endif

using In = Format<IN>;
using Out = Format<OUT>;
constexpr int kTokens = TOKENS, kThreads = 128, kGroup = 32, kCodes = 16 * 8 / BITS;  // codes of one 16-byte load

__device__ __forceinline__ float code_of(const uint4& v, int i) {
  const unsigned words[4] = {v.x, v.y, v.z, v.w};
#if BITS == 8
  return static_cast<float>(static_cast<signed char>(words[i / 4] >> (8 * (i % 4))));
#else
  return static_cast<float>(words[i % 16 / 4] >> (8 * (i % 4) + i / 16 * 4) & 15u);
#endif
}

// grid: outputs / 4 rounded up. x [num_tokens <= kTokens, in_size], rows aligned to 16 bytes
extern "C" __global__ void __launch_bounds__(128)
multiply(const typename In::Type* __restrict__ x, long long x_stride, const unsigned char* __restrict__ codes, const __half* __restrict__ scales, const __half* __restrict__ minima, const float* __restrict__ bias,
         typename Out::Type* __restrict__ out, long long out_stride, int num_tokens, int in_size, int out_size) {
  const int row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
#ifndef BUG_NO_BOUND
  if (row >= out_size) return;  // whole warps
#endif
  const long long num_groups = in_size / kGroup;
  codes += static_cast<long long>(row) * in_size * BITS / 8;
  scales += row * num_groups, minima += row * num_groups;
  float sum[kTokens] = {};
#pragma unroll 2
  for (int first = lane * kCodes; first < in_size; first += 32 * kCodes) {
    const uint4 packed = load16(codes + first * BITS / 8);
    const float scale = __half2float(scales[first / kGroup]);
#if BITS == 4
    const float minimum = __half2float(minima[first / kGroup]);
#endif
#pragma unroll
    for (int t = 0; t < kTokens; t++) {
      const typename In::Type* from = x + min(t, num_tokens - 1) * x_stride + first;
      float product = 0.0f, plain = 0.0f;
#pragma unroll
      for (int part = 0; part < kCodes; part += In::kPerVector) {
        float values[In::kPerVector];
        In::unpack(*reinterpret_cast<const uint4*>(from + part), values);
#pragma unroll
        for (int i = 0; i < In::kPerVector; i++) {
          product = fmaf(values[i], code_of(packed, part + i), product);
          plain += values[i];
        }
      }
      sum[t] = fmaf(scale, product, sum[t]);
#if BITS == 4
      sum[t] = fmaf(minimum, plain, sum[t]);
#endif
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; t++) {
#ifndef BUG_NO_REDUCTION
    sum[t] = warp_sum(sum[t]);
#endif
    if (lane == 0 && t < num_tokens) out[t * out_stride + row] = Out::round(bias == nullptr ? sum[t] : sum[t] + bias[row]);
  }
}
