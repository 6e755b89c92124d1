"""Kernels that break one rule, each with a neighbour that keeps it: memory order, and asynchronous copies."""

from dataclasses import dataclass

HEAD = r"""
using u32 = unsigned int;
__device__ __forceinline__ u32 window(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(window(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}
__device__ __forceinline__ void bar(int id, int n) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(n) : "memory"); }
"""


@dataclass(frozen=True)
class Case:
    """`body` of a kernel `k(float* x, const float4* in, unsigned* u)`, with GOOD or BAD defined.

    x has 256 floats of 1, in 64 vectors, u 8 zeros; two blocks of 64 threads unless said otherwise.
    """

    name: str
    error: str
    body: str
    grid: int = 2
    block: int = 64

    @property
    def source(self) -> str:
        return f'{HEAD}\nextern "C" __global__ void k(float* x, const float4* in, unsigned* u) {{\n{self.body}\n}}\n'


RACES = [
    Case(
        "shared read after write",
        "uninitialised read of shared memory|race on shared memory: read unordered with the write",
        """__shared__ float s[64]; int t = threadIdx.x;
        s[t] = 1;
        #ifdef GOOD
        __syncthreads();
        #endif
        float v = s[63 - t];
        __syncthreads();
        x[blockIdx.x * 64 + t] = v;""",
    ),
    Case(
        "shared write after read",
        "race on shared memory: (read unordered with the write|write unordered with the read)",
        """__shared__ float s[64]; int t = threadIdx.x;
        s[t] = 1;
        __syncthreads();
        float v = s[63 - t];
        #ifdef GOOD
        __syncthreads();
        #endif
        s[t] = v + 1;""",
    ),
    Case(
        "shared write after write",
        "race on shared memory: write unordered with the write",
        """__shared__ float s; int t = threadIdx.x;
        #ifdef GOOD
        if (t == 0)
        #endif
        s = u[t % 8];
        __syncthreads();
        x[blockIdx.x * 64 + t] = s;""",
    ),
    Case(
        "a warp's lanes without __syncwarp",
        "uninitialised read of shared memory|race on shared memory: read unordered with the write",
        """__shared__ float s[64]; int t = threadIdx.x;
        s[t] = 1;
        #ifdef GOOD
        __syncwarp();
        #endif
        x[blockIdx.x * 64 + t] = s[t ^ 1];""",
    ),
    Case(
        "a shuffle orders no memory",
        "uninitialised read of shared memory|race on shared memory: read unordered with the write",
        """__shared__ float s[64]; int t = threadIdx.x;
        s[t] = 1;
        #ifdef GOOD
        __syncwarp();
        #else
        s[t] += __shfl_xor_sync(~0u, 1.f, 1);
        #endif
        x[blockIdx.x * 64 + t] = s[t ^ 1];""",
    ),
    Case(
        "__syncwarp orders one warp only",
        "uninitialised read of shared memory|race on shared memory: read unordered with the write",
        """__shared__ float s[64]; int t = threadIdx.x;
        s[t] = 1;
        __syncwarp();
        #ifdef GOOD
        x[blockIdx.x * 64 + t] = s[t ^ 31];
        #else
        x[blockIdx.x * 64 + t] = s[t ^ 32];
        #endif""",
    ),
    Case(
        "a named barrier orders those who take part",
        "uninitialised read of shared memory|race on shared memory: read unordered with the write",
        """__shared__ float s[128]; int t = threadIdx.x;
        s[t] = 1;
        bar(1 + t / 64, 64);
        #ifdef GOOD
        x[t] = s[t ^ 63];
        #else
        x[t] = s[t ^ 64];
        #endif""",
        grid=1,
        block=128,
    ),
    Case(
        "halves of one word by two threads are no race, one half by both is",
        "race on shared memory: write unordered with the write",
        """__shared__ unsigned short s[128]; int t = threadIdx.x;
        #ifdef GOOD
        s[t] = 1;
        #else
        s[t / 2] = 1;
        #endif
        __syncthreads();
        x[blockIdx.x * 64 + t] = s[t / 2];""",
    ),
    Case(
        "global memory within a block",
        "race on global memory: read unordered with the write|race on global memory: write unordered with the read",
        """int t = threadIdx.x; float* row = x + blockIdx.x * 64;
        row[t] = 2;
        #ifdef GOOD
        __syncthreads();
        #endif
        float v = row[63 - t];
        __syncthreads();
        row[t] = v;""",
    ),
    Case(
        "global memory between blocks",
        "race on global memory: (read|write) unordered with the (read|write) by another block",
        """int t = threadIdx.x;
        #ifdef GOOD
        x[blockIdx.x * 64 + t] += 1;
        #else
        x[t] += 1;
        #endif""",
    ),
    Case(
        "the last block needs a fence before its counter",
        "race on global memory: read unordered with the write by another block",
        """__shared__ bool last; int t = threadIdx.x;
        x[blockIdx.x * 64 + t] = 2;
        #ifdef GOOD
        __threadfence();
        #endif
        __syncthreads();
        if (t == 0) last = atomicAdd(u, 1u) == gridDim.x - 1;
        __syncthreads();
        if (last) {
          __threadfence();
          float v = 0;
          for (int b = 0; b < gridDim.x; b++) v += x[b * 64 + t];
          __syncthreads();
          x[128 + t] = v;
        }""",
    ),
    Case(
        "the last block needs a fence behind its counter",
        "race on global memory: read unordered with the write by another block",
        """__shared__ bool last; int t = threadIdx.x;
        x[blockIdx.x * 64 + t] = 2;
        __threadfence();
        __syncthreads();
        if (t == 0) last = atomicAdd(u, 1u) == gridDim.x - 1;
        __syncthreads();
        if (last) {
          #ifdef GOOD
          __threadfence();
          #endif
          float v = 0;
          for (int b = 0; b < gridDim.x; b++) v += x[b * 64 + t];
          x[128 + t] = v;
        }""",
    ),
    Case(
        "atomics race with plain accesses only",
        "race on global memory",
        """
        #ifdef GOOD
        atomicAdd(u, 1u);
        #else
        if (threadIdx.x == 5) u[0] = 1; else atomicAdd(u, 1u);
        #endif""",
    ),
    Case(
        "a copy that is not waited for",
        "that nobody has waited for",
        """__shared__ float4 s[64]; int t = threadIdx.x;
        copy_async(s + t, in + t);
        commit();
        #ifdef GOOD
        wait<0>();
        #else
        wait<1>();
        #endif
        x[blockIdx.x * 64 + t] = s[t].x;
        wait<0>();""",
    ),
    Case(
        "a copy outside the group that is waited for",
        "that nobody has waited for",
        """__shared__ float4 s[64]; int t = threadIdx.x;
        copy_async(s + t, in + t);
        #ifdef GOOD
        commit();
        #endif
        wait<0>();
        x[blockIdx.x * 64 + t] = s[t].x;
        commit();
        wait<0>();""",
    ),
    Case(
        "a copy of another thread, waited for by it alone",
        "race on shared memory: read (unordered with the write|of the destination of a cp.async)|uninitialised read",
        """__shared__ float4 s[64]; int t = threadIdx.x;
        copy_async(s + t, in + t);
        commit();
        wait<0>();
        #ifdef GOOD
        __syncthreads();
        #endif
        x[blockIdx.x * 64 + t] = s[t ^ 32].x;""",
    ),
    Case(
        "a stage refilled while others still read it",
        "race on shared memory: (read unordered with the write|write unordered with the read)",
        """__shared__ float4 s[64]; int t = threadIdx.x; float sum = 0;
        for (int i = 0; i < 3; i++) {
          copy_async(s + t, in + t);
          commit();
          wait<0>();
          __syncthreads();
          sum += s[63 - t].x;
          #ifdef GOOD
          __syncthreads();
          #endif
        }
        x[blockIdx.x * 64 + t] = sum;""",
    ),
    Case(
        "a thread that leaves its copies behind",
        "cp.async: the thread exits without waiting",
        """__shared__ float4 s[64]; int t = threadIdx.x;
        copy_async(s + t, in + t);
        commit();
        #ifdef GOOD
        wait<0>();
        #endif""",
    ),
]
