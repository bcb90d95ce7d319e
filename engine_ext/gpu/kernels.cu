/* The kernels of the GPU plane: pack tensors into a slab, unpack them, and reduce the parts of all ranks in rank order.
 *
 * `make gpu-kernels` compiles this file to kernels.ptx, which is shipped, so no CUDA compiler is needed to build or install.
 * Results equal those of the CPU's kernels bit by bit, except the sign and payload of a NaN. kernels/kernels.h defines them, and
 * docs/reference/operations.md has the table for users.
 *
 * - Every kernel is one-dimensional and accepts any grid and any block. It has no barrier and no shared memory, so a single
 *   thread can be run and understood.
 * - Pointers need only the alignment of their element type. Memory aligned to 16 bytes is accessed by 16 bytes; a cast takes as
 *   many elements at once as 16 bytes hold of the wider type.
 * - Values are divided by the divisor, then multiplied by the factor; 1 leaves them unchanged. Both come as float64 and are
 *   rounded to the type of the computation.
 * - Kernels do not check their arguments; their caller does.
 */

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef float f32;
typedef double f64;
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct b8 { u8 byte; };

/* The order of enum engine_op in kernels/kernels.h. */
enum { SUM, AVERAGE, MIN, MAX, PRODUCT };

/* One tensor of a plan. Rows lie in the order of their offsets and do not overlap. */
struct row {
  u64 tensor; /* its address; 0: this rank has none. Pack fills its place with the identity, unpack skips it. */
  u64 offset; /* its place in bytes from the kernel's parameter `slab`: a multiple of the size of its elements there, best of
               * 16 */
  u64 bytes;  /* its size in the slab; 0 is allowed */
};

/* PIECE: bytes of the slab that a warp takes at a time. VECTOR: bytes of the widest access. */
enum : u64 { PIECE = 2048, VECTOR = 16 };
enum : u32 {
  WARP = 32,
  AT_ONCE = 4, /* units that a thread reads before it writes, as otherwise it would mostly wait for memory */
};

/* Threads of a warp that share a tensor: the number of this thread among them, and their count. */
struct team { u32 member, members; };

/* ---- memory: accesses name the device's global memory, as a generic access first has to find out the kind ------------------ */

union alignas(VECTOR) vector {
  u32 words[4];
};

#define ACCESS(T, suffix, constraint, R)                                                          \
  __device__ __forceinline__ void load(u64 at, T &x) {                                            \
    R value;                                                                                      \
    asm volatile("ld.global." suffix " %0, [%1];" : "=" constraint(value) : "l"(at));             \
    x = (T)value;                                                                                 \
  }                                                                                               \
  __device__ __forceinline__ void store(u64 at, T x) {                                            \
    asm volatile("st.global." suffix " [%0], %1;" ::"l"(at), constraint((R)x) : "memory");        \
  }
ACCESS(u8, "u8", "h", u16)
ACCESS(i8, "s8", "h", i16)
ACCESS(u16, "u16", "h", u16)
ACCESS(i16, "s16", "h", i16)
ACCESS(u32, "u32", "r", u32)
ACCESS(i32, "s32", "r", i32)
ACCESS(u64, "u64", "l", u64)
ACCESS(i64, "s64", "l", i64)
ACCESS(f32, "f32", "f", f32)
ACCESS(f64, "f64", "d", f64)
__device__ __forceinline__ void load(u64 at, f16 &x) { load(at, x.bits); }
__device__ __forceinline__ void load(u64 at, bf16 &x) { load(at, x.bits); }
__device__ __forceinline__ void load(u64 at, b8 &x) { load(at, x.byte); }
__device__ __forceinline__ void store(u64 at, f16 x) { store(at, x.bits); }
__device__ __forceinline__ void store(u64 at, bf16 x) { store(at, x.bits); }
__device__ __forceinline__ void store(u64 at, b8 x) { store(at, x.byte); }
__device__ __forceinline__ void load(u64 at, vector &x) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3])
               : "l"(at));
}
__device__ __forceinline__ void store(u64 at, const vector &x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.words[0]), "r"(x.words[1]), "r"(x.words[2]),
               "r"(x.words[3])
               : "memory");
}

/* `N` elements of 4, 8 or 16 bytes together, at an address aligned to that size. */
template <class T, u32 N>
union group {
  T elements[N];
  u32 word;
  u64 words;
  vector whole;
};
template <u32 BYTES> struct part_of_group;
template <> struct part_of_group<4> { template <class G> static __device__ __forceinline__ u32 &of(G &x) { return x.word; } };
template <> struct part_of_group<8> { template <class G> static __device__ __forceinline__ u64 &of(G &x) { return x.words; } };
template <> struct part_of_group<16> { template <class G> static __device__ __forceinline__ vector &of(G &x) { return x.whole; } };

template <class T, u32 N>
__device__ __forceinline__ void load(u64 at, group<T, N> &x) { load(at, part_of_group<N * sizeof(T)>::of(x)); }

template <class T, u32 N>
__device__ __forceinline__ void store(u64 at, group<T, N> &x) { store(at, part_of_group<N * sizeof(T)>::of(x)); }

/* ---- numbers --------------------------------------------------------------------------------------------------------------- */

/* Convert an element to the type of its computation. */
__device__ __forceinline__ f32 widen(f16 x) {
  f32 wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
}
__device__ __forceinline__ f32 widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ f32 widen(f32 x) { return x; }
__device__ __forceinline__ f64 widen(f64 x) { return x; }
__device__ __forceinline__ i64 widen(b8 x) { return x.byte != 0; }
template <class T>
__device__ __forceinline__ i64 widen(T x) { return x; }

/* Convert a result to its dtype: round to nearest even; values that are too large become infinite. */
__device__ __forceinline__ void narrow(f32 x, f16 &half) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(x)); }
__device__ __forceinline__ void narrow(f32 x, bf16 &half) {
  u32 bits = __float_as_uint(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  half.bits = (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded;
}
__device__ __forceinline__ void narrow(f32 x, f32 &y) { y = x; }
__device__ __forceinline__ void narrow(f64 x, f64 &y) { y = x; }
/* float64 is rounded to float32 first, then to the half type. */
__device__ __forceinline__ void narrow(f64 x, f16 &half) { narrow((f32)x, half); }
__device__ __forceinline__ void narrow(f64 x, bf16 &half) { narrow((f32)x, half); }

/* The type in which a dtype is accumulated and computed. All integers share int64: a sum of narrow integers is exact, as Average
 * needs it, and its low bits are the wrapped sum. */
template <class T> struct accumulator { typedef i64 type; };
template <> struct accumulator<f16> { typedef f32 type; };
template <> struct accumulator<bf16> { typedef f32 type; };
template <> struct accumulator<f32> { typedef f32 type; };
template <> struct accumulator<f64> { typedef f64 type; };

template <class T> struct range;
template <> struct range<i8> { enum : i64 { LEAST = -0x80, GREATEST = 0x7f }; };
template <> struct range<u8> { enum : i64 { LEAST = 0, GREATEST = 0xff }; };
template <> struct range<i16> { enum : i64 { LEAST = -0x8000, GREATEST = 0x7fff }; };
template <> struct range<u16> { enum : i64 { LEAST = 0, GREATEST = 0xffff }; };
template <> struct range<i32> { enum : i64 { LEAST = -0x80000000ll, GREATEST = 0x7fffffff }; };
template <> struct range<i64> { enum : i64 { LEAST = -0x7fffffffffffffffll - 1, GREATEST = 0x7fffffffffffffffll }; };

/* Divide, then multiply. Integers are divided toward zero, and saturate. Below 2^52, a fractional quotient of integers lies
 * further from the next integer than its rounding error. So truncating the rounded quotient is exact; int64 is divided as an
 * integer, since it exceeds 2^52. */
template <class T>
__device__ __forceinline__ f32 finish(f32 x, f64 divisor, f64 factor) {
  if (divisor != 1) x = x / (f32)divisor;
  return x * (f32)factor;
}
template <class T>
__device__ __forceinline__ f64 finish(f64 x, f64 divisor, f64 factor) {
  if (divisor != 1) x = x / divisor;
  return x * factor;
}
template <class T>
__device__ __forceinline__ i64 finish(i64 x, f64 divisor, f64 factor) {
  enum : i64 { LEAST = range<T>::LEAST, GREATEST = range<T>::GREATEST };
  if (divisor != 1) {
    x = sizeof(T) < sizeof(i64) ? (i64)((f64)x / divisor) : x / (i64)divisor;
    x = x < LEAST ? LEAST : x > GREATEST ? GREATEST : x;
  }
  if (factor != 1) {
    f64 y = (f64)(T)x * factor;
    y = y > (f64)LEAST ? y : (f64)LEAST;
    x = y < (f64)GREATEST ? (i64)y : (i64)GREATEST;
  }
  return x;
}
template <>
__device__ __forceinline__ i64 finish<b8>(i64 x, f64, f64) { return x; }
template <class T>
__device__ __forceinline__ void narrow(i64 x, T &y) { y = (T)x; }
__device__ __forceinline__ void narrow(i64 x, b8 &y) { y.byte = (u8)x; }

/* A NaN on either side wins; of equal values, the later rank's is taken. */
template <class A>
__device__ __forceinline__ A lesser(A x, A y) { return (x < y) | (x != x) ? x : y; }
template <class A>
__device__ __forceinline__ A greater(A x, A y) { return (x > y) | (x != x) ? x : y; }
__device__ __forceinline__ f32 add(f32 x, f32 y) { return x + y; }
__device__ __forceinline__ f64 add(f64 x, f64 y) { return x + y; }
__device__ __forceinline__ i64 add(i64 x, i64 y) { return (i64)((u64)x + (u64)y); }
__device__ __forceinline__ f32 multiply(f32 x, f32 y) { return x * y; }
__device__ __forceinline__ f64 multiply(f64 x, f64 y) { return x * y; }
__device__ __forceinline__ i64 multiply(i64 x, i64 y) { return (i64)((u64)x * (u64)y); }

template <class A>
__device__ __forceinline__ A combine(u32 op, A x, A y) {
  switch (op) {
    case MIN: return lesser(x, y);
    case MAX: return greater(x, y);
    case PRODUCT: return multiply(x, y);
    default: return add(x, y);
  }
}

/* ---- pieces of one tensor, which the threads of a team share --------------------------------------------------------------- */

__device__ __forceinline__ u64 least(u64 x, u64 y) { return x < y ? x : y; }
__device__ __forceinline__ u32 least(u32 x, u32 y) { return x < y ? x : y; }

/* Return the number of elements up to the next multiple of 16 bytes. */
template <class T>
__device__ __forceinline__ u32 up_to_aligned(u64 at) { return ((u32)-at & (VECTOR - 1)) / sizeof(T); }

/* Process units in turn: read(i, x) for `K` of them, then write(i, x) for these; the remaining units one by one. */
template <u32 K, class T, class Read, class Write>
__device__ __forceinline__ void in_turn(team t, u32 count, Read read, Write write) {
  u32 i = t.member;
  if (K > 1)
    for (; i + (K - 1) * t.members < count; i += K * t.members) {
      T x[K];
#pragma unroll
      for (u32 k = 0; k < K; k++) read(i + k * t.members, x[k]);
#pragma unroll
      for (u32 k = 0; k < K; k++) write(i + k * t.members, x[k]);
    }
#pragma unroll 1
  for (; i < count; i += t.members) {
    T x;
    read(i, x);
    write(i, x);
  }
}

template <class T, u32 K>
__device__ __forceinline__ void copy_units(team t, u64 to, u64 from, u32 count) {
  in_turn<K, T>(
      t, count, [=](u32 i, T &x) { load(from + i * sizeof(T), x); }, [=](u32 i, const T &x) { store(to + i * sizeof(T), x); });
}

/* Copy the aligned units of T, and the bytes before and after them one by one. */
template <class T>
__device__ __forceinline__ void copy_by(team t, u64 to, u64 from, u32 bytes) {
  u32 head = least((u32)-to & (u32)(sizeof(T) - 1), bytes), whole = (bytes - head) / sizeof(T) * sizeof(T), tail = head + whole;
  if (sizeof(T) > 1) copy_units<u8, 1>(t, to, from, head);
  copy_units<T, AT_ONCE>(t, to + head, from + head, whole / sizeof(T));
  if (sizeof(T) > 1) copy_units<u8, 1>(t, to + tail, from + tail, bytes - tail);
}

/* Copy by the widest unit to which both sides can be aligned. */
__device__ __forceinline__ void copy(team t, u64 to, u64 from, u32 bytes) {
  u64 apart = (to ^ from) & (VECTOR - 1);
  if (apart == 0) copy_by<vector>(t, to, from, bytes);
  else if ((apart & 3) == 0) copy_by<u32>(t, to, from, bytes);
  else if ((apart & 1) == 0) copy_by<u16>(t, to, from, bytes);
  else copy_by<u8>(t, to, from, bytes);
}

template <class C, class To, class From>
__device__ __forceinline__ void convert(To &y, From x, f64 divisor, f64 factor) {
  narrow(finish<To>((C)widen(x), divisor, factor), y);
}
template <class C>
__device__ __forceinline__ void convert(b8 &y, b8 x, f64, f64) { y.byte = x.byte != 0; }

/* The number of groups of `N` that a thread reads before it writes. It is 1 for integers: each takes many instructions, all of
 * which the driver has to compile. */
template <class C, u32 N> struct at_once { enum : u32 { K = N > 4 ? 2 : AT_ONCE }; };
template <u32 N> struct at_once<i64, N> { enum : u32 { K = 1 }; };

/* Convert `count` elements from From to To, computed in C. They are accessed by groups of 16 bytes of the wider type. */
template <class C, class To, class From>
__device__ __forceinline__ void convert_all(team t, u64 to, u64 from, u32 count, f64 divisor, f64 factor) {
  enum : u32 { WIDER = sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From), N = VECTOR / WIDER };
  u32 head = sizeof(To) > sizeof(From) ? up_to_aligned<To>(to) : up_to_aligned<From>(from);
  bool aligned = ((to + head * sizeof(To)) & (N * sizeof(To) - 1) | (from + head * sizeof(From)) & (N * sizeof(From) - 1)) == 0;
  head = aligned ? least(head, count) : count;
  u32 groups = (count - head) / N, whole = groups * N;
  in_turn<at_once<C, N>::K, From>(
      t, count - whole, [=](u32 i, From &x) { load(from + (i < head ? i : i + whole) * sizeof(From), x); },
      [=](u32 i, From x) {
        To y;
        convert<C>(y, x, divisor, factor);
        store(to + (i < head ? i : i + whole) * sizeof(To), y);
      });
  in_turn<at_once<C, N>::K, group<From, N>>(
      t, groups, [=](u32 i, group<From, N> &x) { load(from + (head + i * N) * sizeof(From), x); },
      [=](u32 i, const group<From, N> &x) {
        group<To, N> y;
#pragma unroll
        for (u32 k = 0; k < N; k++) convert<C>(y.elements[k], x.elements[k], divisor, factor);
        store(to + (head + i * N) * sizeof(To), y);
      });
}

/* Fill memory with the 8 bytes of `identity`, repeated, starting with its byte `phase` modulo 8. */
__device__ __forceinline__ void fill(team t, u64 to, u32 bytes, u64 identity, u64 phase) {
  u32 head = least((u32)-to & 7u, bytes), words = (bytes - head) / 8, tail = head + words * 8;
  u32 turn = 8 * ((u32)(phase + head) & 7);
  u64 turned = identity >> turn | identity << 1 << (63 - turn); /* in two steps, as turn 0 means a shift by 64 */
  for (u32 i = t.member; i < words; i += t.members) store(to + head + i * 8, turned);
  for (u32 i = t.member; i < head + bytes - tail; i += t.members) {
    u32 at = i < head ? i : i - head + tail;
    store(to + at, (u8)(identity >> 8 * ((phase + at) & 7)));
  }
}

/* ---- plans: which piece of which tensor a team has -------------------------------------------------------------------------- */

/* Warps take the slab's pieces in turn. If a table has several rows, they are followed by a number of 4 bytes for each piece
 * and one for the end. The number is twice the index of the first row that ends behind the piece's beginning (or the number
 * of rows), plus 1 if that row begins before the piece. So a piece's number and the next one tell its rows. The warp is
 * divided into a team for each row, as far as its threads suffice. act(team, row, first, bytes) gets `bytes` bytes of the
 * slab, which begin `first` bytes after the row's first. */
template <class Act>
__device__ __forceinline__ void for_each_piece(u64 table, u64 rows, u64 end, Act act) {
  u32 thread = threadIdx.x % WARP, threads = least((u32)WARP, blockDim.x - (threadIdx.x - thread));
  u32 warps = (blockDim.x + WARP - 1) / WARP;
  u64 pieces = table + rows * sizeof(row);
  for (u64 p = blockIdx.x * (u64)warps + threadIdx.x / WARP; p * PIECE < end; p += gridDim.x * (u64)warps) {
    u32 here = 0, next = 2;
    if (rows > 1) {
      load(pieces + p * sizeof(u32), here);
      load(pieces + (p + 1) * sizeof(u32), next);
    }
    u32 low = here / 2, high = next / 2 + next % 2, found = high - low;
    u32 members = found < threads ? threads / (found + (found == 0)) : 1, teams = threads / members;
    team t = {thread % members, members};
    for (u32 r = low + thread / members; r < high && thread / members < teams; r += teams) {
      u64 tensor, offset, bytes;
      load(table + r * sizeof(row), tensor);
      load(table + r * sizeof(row) + 8, offset);
      load(table + r * sizeof(row) + 16, bytes);
      u64 first = offset < p * PIECE ? p * PIECE - offset : 0, last = least(bytes, (p + 1) * PIECE - offset);
      if (first < last) act(t, row{tensor, offset, bytes}, first, (u32)(last - first));
    }
  }
}

/* Pack tensors of From into the slab as To. */
template <class C, class To, class From>
__device__ __forceinline__ void pack(u64 table, u64 rows, u64 end, u64 slab, u64 identity, f64 divisor, f64 factor) {
  for_each_piece(table, rows, end, [=](team t, row r, u64 first, u32 bytes) {
    u64 to = slab + r.offset + first, from = r.tensor + first / sizeof(To) * sizeof(From);
    if (r.tensor == 0) fill(t, to, bytes, identity, first);
    else convert_all<C, To, From>(t, to, from, bytes / sizeof(To), divisor, factor);
  });
}

/* Unpack From in the slab into tensors of To. */
template <class C, class To, class From>
__device__ __forceinline__ void unpack(u64 table, u64 rows, u64 end, u64 slab, f64 divisor, f64 factor) {
  for_each_piece(table, rows, end, [=](team t, row r, u64 first, u32 bytes) {
    u64 from = slab + r.offset + first, to = r.tensor + first / sizeof(From) * sizeof(To);
    if (r.tensor != 0) convert_all<C, To, From>(t, to, from, bytes / sizeof(From), divisor, factor);
  });
}

/* ---- the ordered reduction: the parts of all ranks become one, in rank order ----------------------------------------------- */

/* Part k lies `k * stride` bytes after `parts`, except part `own`, which lies at `own_part` (own = count: no exception). `result`
 * may be the address of a part. */
template <class T>
__device__ __forceinline__ void reduce(u64 result, u64 parts, u64 stride, u64 own_part, u32 own, u32 count, u64 elements, u32 op,
                                       f64 divisor, f64 factor) {
  typedef typename accumulator<T>::type A;
  enum : u32 { N = VECTOR / sizeof(T) };
  bool aligned = ((result | parts | stride | own_part) & (VECTOR - 1)) == 0;
  u64 groups = aligned ? elements / N : 0, thread = blockIdx.x * (u64)blockDim.x + threadIdx.x;
  u64 threads = gridDim.x * (u64)blockDim.x;
  for (u64 i = thread; i < groups; i += threads) {
    A sums[N];
    group<T, N> x;
    for (u32 k = 0; k < count; k++) {
      load((k == own ? own_part : parts + k * stride) + i * VECTOR, x);
#pragma unroll
      for (u32 j = 0; j < N; j++) sums[j] = k == 0 ? (A)widen(x.elements[j]) : combine<A>(op, sums[j], widen(x.elements[j]));
    }
#pragma unroll
    for (u32 j = 0; j < N; j++) narrow(finish<T>(sums[j], divisor, factor), x.elements[j]);
    store(result + i * VECTOR, x);
  }
  for (u64 i = groups * N + thread; i < elements; i += threads) {
    A sum;
    T x;
    for (u32 k = 0; k < count; k++) {
      load((k == own ? own_part : parts + k * stride) + i * sizeof(T), x);
      sum = k == 0 ? (A)widen(x) : combine<A>(op, sum, widen(x));
    }
    narrow(finish<T>(sum, divisor, factor), x);
    store(result + i * sizeof(T), x);
  }
}

/* Sum of bool tells whether any value is true, Product whether all are: these are the greatest and the least value. */
__device__ __forceinline__ u32 op_of_bool(u32 op) { return op == SUM ? MAX : op == PRODUCT ? MIN : op; }

/* ---- entry points ---------------------------------------------------------------------------------------------------------- */

#define PACK(tensor, Tensor, wire, Wire, C)                                                                                     \
  extern "C" __global__ void pack_##tensor##_##wire(u64 table, u64 rows, u64 end, u64 slab, u64 identity, f64 divisor, f64 factor) {     \
    pack<C, Wire, Tensor>(table, rows, end, slab, identity, divisor, factor);                                                        \
  }
#define BOTH_WAYS(tensor, Tensor, wire, Wire, C)                                                                                \
  PACK(tensor, Tensor, wire, Wire, C)                                                                                           \
  extern "C" __global__ void unpack_##tensor##_##wire(u64 table, u64 rows, u64 end, u64 slab, f64 divisor, f64 factor) {                 \
    unpack<C, Tensor, Wire>(table, rows, end, slab, divisor, factor);                                                                \
  }
#define REDUCE(dtype, T, op_of)                                                                                                 \
  extern "C" __global__ void reduce_##dtype(u64 result, u64 parts, u64 stride, u64 own_part, u32 own, u32 count, u64 elements,  \
                                            u32 op, f64 divisor, f64 factor) {                                                  \
    reduce<T>(result, parts, stride, own_part, own, count, elements, op_of(op), divisor, factor);                               \
  }

/* Pack and unpack elements of any dtype unchanged. */
extern "C" __global__ void pack_bytes(u64 table, u64 rows, u64 end, u64 slab, u64 identity) {
  for_each_piece(table, rows, end, [=](team t, row r, u64 first, u32 bytes) {
    if (r.tensor == 0) fill(t, slab + r.offset + first, bytes, identity, first);
    else copy(t, slab + r.offset + first, r.tensor + first, bytes);
  });
}
extern "C" __global__ void unpack_bytes(u64 table, u64 rows, u64 end, u64 slab) {
  for_each_piece(table, rows, end, [=](team t, row r, u64 first, u32 bytes) {
    if (r.tensor != 0) copy(t, r.tensor + first, slab + r.offset + first, bytes);
  });
}

/* Pack bool: any nonzero byte becomes 1, so that the greatest and least byte are those of bool. unpack_bytes unpacks it. */
PACK(bool, b8, bool, b8, i64)

BOTH_WAYS(float16, f16, float16, f16, f32)
BOTH_WAYS(bfloat16, bf16, bfloat16, bf16, f32)
BOTH_WAYS(float32, f32, float32, f32, f32)
BOTH_WAYS(float32, f32, float16, f16, f32)
BOTH_WAYS(float32, f32, bfloat16, bf16, f32)
BOTH_WAYS(float64, f64, float64, f64, f64)
BOTH_WAYS(float64, f64, float16, f16, f64)
BOTH_WAYS(float64, f64, bfloat16, bf16, f64)
BOTH_WAYS(int8, i8, int8, i8, i64)
BOTH_WAYS(uint8, u8, uint8, u8, i64)
BOTH_WAYS(int16, i16, int16, i16, i64)
BOTH_WAYS(uint16, u16, uint16, u16, i64)
BOTH_WAYS(int32, i32, int32, i32, i64)
BOTH_WAYS(int64, i64, int64, i64, i64)

#define AS_IT_IS(op) op
REDUCE(float16, f16, AS_IT_IS)
REDUCE(bfloat16, bf16, AS_IT_IS)
REDUCE(float32, f32, AS_IT_IS)
REDUCE(float64, f64, AS_IT_IS)
REDUCE(int8, i8, AS_IT_IS)
REDUCE(uint8, u8, AS_IT_IS)
REDUCE(int16, i16, AS_IT_IS)
REDUCE(uint16, u16, AS_IT_IS)
REDUCE(int32, i32, AS_IT_IS)
REDUCE(int64, i64, AS_IT_IS)
REDUCE(bool, b8, op_of_bool)
