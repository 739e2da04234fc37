// Device primitives: every instruction that CUDA C++ does not say is here, one to a function.
// On the CPU (CUDA_ON_CPU) the test bed's header gives the same functions their meaning.
#pragma once
#ifndef CUDA_ON_CPU
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#define SHARED_MEMORY(name) extern __shared__ __align__(16) char name[]

// 2^x, 2 ulp, denormals to 0
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 16 bytes that are read once: not kept in the first-level cache
__device__ __forceinline__ uint4 load16(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void copy_async16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async4(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroups>
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory"); }
__device__ __forceinline__ void load_matrix_x4(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void load_matrix_x4_transposed(unsigned (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
// d[16 x 8] += a[16 x 16] b[16 x 8]; element (row, column) of d is in lane row % 8 * 4 + column / 2
template <class Element>
__device__ __forceinline__ void mma_16816_of(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]);
template <>
__device__ __forceinline__ void mma_16816_of<__nv_bfloat16>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_16816_of<__half>(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#define mma_16816(Element, d, a, b) mma_16816_of<Element>(d, a, b)
#endif

// ---- number formats: 16 bytes of a stored type to and from f32; kLargest: the code of a row's largest element, 0: rows have no scale

constexpr int kF32 = 0, kBF16 = 1, kF16 = 2, kFP8 = 3, kInt8 = 4;

template <int kFormat> struct Format;
template <> struct Format<kF32> {
  using Type = float;
  static constexpr int kPerVector = 4;
  static constexpr float kLargest = 0.0f;
  static __device__ __forceinline__ float load(const float* p) { return *p; }
  static __device__ __forceinline__ float round(float x) { return x; }
  static __device__ __forceinline__ void unpack(const uint4& v, float (&x)[4]) {
    x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y), x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
  }
};
template <> struct Format<kBF16> {
  using Type = __nv_bfloat16;
  static constexpr int kPerVector = 8;
  static constexpr float kLargest = 0.0f;
  static __device__ __forceinline__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
  static __device__ __forceinline__ __nv_bfloat16 round(float x) { return __float2bfloat16(x); }
  static __device__ __forceinline__ void unpack(const uint4& v, float (&x)[8]) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[2 * i] = __uint_as_float(words[i] << 16), x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
};
template <> struct Format<kF16> {
  using Type = __half;
  static constexpr int kPerVector = 8;
  static constexpr float kLargest = 0.0f;
  static __device__ __forceinline__ float load(const __half* p) { return __half2float(*p); }
  static __device__ __forceinline__ __half round(float x) { return __float2half(x); }
  static __device__ __forceinline__ void unpack(const uint4& v, float (&x)[8]) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      __half2_raw pair;
      pair.x = static_cast<unsigned short>(words[i]), pair.y = static_cast<unsigned short>(words[i] >> 16);
      const float2 two = __half22float2(__half2(pair));
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
  }
};
template <> struct Format<kFP8> {
  using Type = __nv_fp8_storage_t;
  static constexpr int kPerVector = 16;
  static constexpr float kLargest = 448.0f;
  static __device__ __forceinline__ Type round(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
  static __device__ __forceinline__ void unpack(const uint4& v, float (&x)[16]) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const auto codes = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (16 * (i & 1)));
      const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3)));
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
  }
};
template <> struct Format<kInt8> {
  using Type = signed char;
  static constexpr int kPerVector = 16;
  static constexpr float kLargest = 127.0f;
  static __device__ __forceinline__ Type round(float x) { return static_cast<signed char>(rintf(x)); }
  static __device__ __forceinline__ void unpack(const uint4& v, float (&x)[16]) {
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = static_cast<float>(static_cast<signed char>(words[i / 4] >> (8 * (i % 4))));
  }
};

// Sum and maximum over the lanes of a warp; every lane gets the result. NaN wins a sum and loses a maximum.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, lanes));
  return x;
}
