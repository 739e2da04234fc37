// What happens to an activation between products: norms, gates, rotation with the write of keys and values.
//
// | version                                                            | registers sm_90 | H200, 64 x 4096 |
// |--------------------------------------------------------------------|-----------------|-----------------|
// | a norm's row kept in registers: one read, but 40 registers at 8192 | not built       |                 |
// | this: the second read of a row comes from the first-level cache    | see budget_cuda.json |                 |
//
// kVector elements go through a thread at a time, 16 bytes of a 16-bit type, where rows are aligned to it.
#include "primitives.cuh"

#ifndef IN
#error "IN, OUT, VECTOR (norm, gate), VALUE, STORED (rope_write_kv), RESIDUAL (norm), GELU (gate) specialise this file"
#endif
#ifndef VECTOR
#define VECTOR 1
#endif
#ifndef RESIDUAL
#define RESIDUAL 0
#endif
#ifndef GELU
#define GELU 0
#endif
#ifndef VALUE
#define VALUE IN
#endif
#ifndef STORED
#define STORED OUT
#endif

using In = Format<IN>;
using Out = Format<OUT>;
using Value = Format<VALUE>;
using Stored = Format<STORED>;
constexpr int kVector = VECTOR, kThreads = 256;

template <class F>
__device__ __forceinline__ void load_elements(const typename F::Type* from, float (&x)[kVector]) {
  constexpr int kLoads = kVector / F::kPerVector;
  if (kLoads == 0) {
#pragma unroll
    for (int i = 0; i < kVector; i++) x[i] = F::load(from + i);
  }
#pragma unroll
  for (int load = 0; load < kLoads; load++) {
    float part[F::kPerVector];
    F::unpack(*reinterpret_cast<const uint4*>(from + load * F::kPerVector), part);
#pragma unroll
    for (int i = 0; i < F::kPerVector; i++) x[load * F::kPerVector + i] = part[i];
  }
}

template <class F>
__device__ __forceinline__ void store_elements(typename F::Type* to, const float (&x)[kVector]) {
  alignas(16) typename F::Type rounded[kVector];
#pragma unroll
  for (int i = 0; i < kVector; i++) rounded[i] = F::round(x[i]);
  if (kVector * sizeof(typename F::Type) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(kVector * sizeof(typename F::Type) / 16); i++) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(rounded)[i];
  } else {
#pragma unroll
    for (int i = 0; i < kVector; i++) to[i] = rounded[i];
  }
}

// Sum over the block; every thread gets it. `shared` holds a float per warp.
__device__ __forceinline__ float block_sum(float x, float* shared) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
#ifndef BUG_NO_BARRIER_IN_SUM
  __syncthreads();
#endif
  float sum = 0.0f;
  for (unsigned warp = 0; warp < blockDim.x / 32; warp++) sum += shared[warp];
  return sum;
}

// grid: rows, groups of a row. residual, where RESIDUAL: [rows, size] f32, gets x added to it and is normed.
extern "C" __global__ void __launch_bounds__(256)
rms_norm(const typename In::Type* __restrict__ x, long long x_stride, float* residual, long long residual_stride, const float* __restrict__ weight, typename Out::Type* __restrict__ out, long long out_stride, int size, float eps) {
  SHARED_MEMORY(memory);
  x += blockIdx.x * x_stride + static_cast<long long>(blockIdx.y) * size;
  out += blockIdx.x * out_stride + static_cast<long long>(blockIdx.y) * size;
  residual += blockIdx.x * residual_stride;
  float sum = 0.0f;
  for (int i = threadIdx.x * kVector; i < size; i += blockDim.x * kVector) {
    float part[kVector];
    load_elements<In>(x + i, part);
#if RESIDUAL
    float before[kVector];
    load_elements<Format<kF32>>(residual + i, before);
#pragma unroll
    for (int e = 0; e < kVector; e++) part[e] += before[e];
    store_elements<Format<kF32>>(residual + i, part);
#endif
#pragma unroll
    for (int e = 0; e < kVector; e++) sum = fmaf(part[e], part[e], sum);
  }
  const float scale = rsqrtf(block_sum(sum, reinterpret_cast<float*>(memory)) / size + eps);
  for (int i = threadIdx.x * kVector; i < size; i += blockDim.x * kVector) {
    float part[kVector], factor[kVector];
#if RESIDUAL
    load_elements<Format<kF32>>(residual + i, part);
#else
    load_elements<In>(x + i, part);
#endif
    load_elements<Format<kF32>>(weight + i, factor);
#pragma unroll
    for (int e = 0; e < kVector; e++) part[e] *= scale * factor[e];
    store_elements<Out>(out + i, part);
  }
}

// grid: rows, parts of a row. x [rows, 2 * size] -> out [rows, size]
extern "C" __global__ void __launch_bounds__(256)
gate_mul(const typename In::Type* __restrict__ x, long long x_stride, typename Out::Type* __restrict__ out, long long out_stride, int size) {
  const int i = (blockIdx.y * kThreads + threadIdx.x) * kVector;
#ifndef BUG_NO_BOUND
  if (i >= size) return;
#endif
  x += blockIdx.x * x_stride + i;
  float gate[kVector], up[kVector];
  load_elements<In>(x, gate);
  load_elements<In>(x + size, up);
#pragma unroll
  for (int e = 0; e < kVector; e++) {
    const float g = gate[e];
#if GELU
    constexpr float kSqrt2OverPi = 0.7978845608028654f;
    up[e] *= 0.5f * g * (1.0f + tanhf(kSqrt2OverPi * (g + 0.044715f * g * g * g)));
#else
    up[e] *= g / (1.0f + expf(-g));
#endif
  }
  store_elements<Out>(out + blockIdx.x * out_stride + i, up);
}

// Element e of a rotated row: the first half of the rotary part pairs with the second.
__device__ __forceinline__ float rotated(const typename In::Type* row, int e, const float* cosines, const float* sines, int half) {
  const float x = In::load(row + e);
  if (e >= 2 * half) return x;
  const float cosine = cosines[e % half], sine = sines[e % half];
  return e < half ? x * cosine - In::load(row + e + half) * sine : x * cosine + In::load(row + e - half) * sine;
}

// One warp writes one row of one head into the pool: plain, or as codes with the row's scale.
template <class Element>
__device__ __forceinline__ void store_row(const Element& element, typename Stored::Type* to, float* scale_at, int head_dim) {
  const int lane = threadIdx.x % 32;
  if constexpr (Stored::kLargest > 0.0f) {
    float largest = 0.0f;
    bool has_nan = false;
    for (int e = lane; e < head_dim; e += 32) {
      const float x = element(e);
      largest = fmaxf(largest, fabsf(x));
      has_nan |= isnan(x);
    }
    // fmaxf loses a NaN: the scale carries it, as int8 codes cannot
    largest = warp_max(largest);
    const bool any_nan = __ballot_sync(0xFFFFFFFFu, has_nan) != 0;
    if (lane == 0) *scale_at = any_nan ? __uint_as_float(0x7FC00000u) : largest * (1.0f / fmaxf(Stored::kLargest, 1.0f));
    const float factor = Stored::kLargest / (largest == 0.0f ? 1.0f : largest);
    for (int e = lane; e < head_dim; e += 32) {
      const float x = element(e) * factor;
      to[e] = Stored::round(isnan(x) ? 0.0f : fminf(fmaxf(x, -Stored::kLargest), Stored::kLargest));
    }
  } else {
    for (int e = lane; e < head_dim; e += 32) to[e] = Stored::round(element(e));
  }
}

// grid: tokens, heads / 8 rounded up; one warp per head of q, then of k, then of v
extern "C" __global__ void __launch_bounds__(256, 4)
rope_write_kv(const typename In::Type* __restrict__ q, long long q_stride, const typename In::Type* __restrict__ k, long long k_stride, const typename Value::Type* __restrict__ v, long long v_stride,
              const float* __restrict__ cosines, const float* __restrict__ sines, const int* __restrict__ positions, const long long* __restrict__ slots, typename Stored::Type* __restrict__ keys,
              typename Stored::Type* __restrict__ values, float* __restrict__ key_scale, float* __restrict__ value_scale, typename Out::Type* __restrict__ out, long long out_stride, int num_heads, int num_kv_heads, int head_dim,
              int half) {
  const long long token = blockIdx.x;
  int head = blockIdx.y * (kThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  cosines += static_cast<long long>(positions[token]) * half, sines += static_cast<long long>(positions[token]) * half;
  if (head < num_heads) {
    const typename In::Type* row = q + token * q_stride + head * head_dim;
    for (int e = lane; e < head_dim; e += 32) out[token * out_stride + head * head_dim + e] = Out::round(rotated(row, e, cosines, sines, half));
    return;
  }
  const long long slot = slots[token];
  head -= num_heads;
#ifdef BUG_NO_BOUND
  if (head >= 2 * num_kv_heads) return;
#else
  if (head >= 2 * num_kv_heads || slot < 0) return;
#endif
  const bool is_key = head < num_kv_heads;
  if (!is_key) head -= num_kv_heads;
  const long long line = slot * num_kv_heads + head;
  if (is_key) {
    const typename In::Type* row = k + token * k_stride + head * head_dim;
    store_row([&](int e) { return rotated(row, e, cosines, sines, half); }, keys + line * head_dim, key_scale + line, head_dim);
  } else {
    const typename Value::Type* row = v + token * v_stride + head * head_dim;
    store_row([&](int e) { return Value::load(row + e); }, values + line * head_dim, value_scale + line, head_dim);
  }
}
