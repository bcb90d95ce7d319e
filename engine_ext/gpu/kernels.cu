/* What the GPU plane runs on the device: pack tensors into a slab, unpack them, and reduce the parts of all ranks in rank order.
 *
 * `make gpu-kernels` compiles this to kernels.ptx, which is what is shipped: no CUDA compiler is needed to build or to install.
 * The numbers are those of the CPU's kernels (kernels/kernels.h says which, docs/operations.md is the table for users), bit by
 * bit but for the sign and payload of a NaN.
 *
 * - Every kernel is one-dimensional, takes any grid and any block, and has no barrier and no shared memory: a thread alone can
 *   be run and understood.
 * - Pointers need the alignment of their element type, no more. What is aligned to 16 bytes is read and written by 16 bytes.
 * - A factor is multiplied with, after the division by the divisor; 1 is none. Both come as float64 and are rounded to the type
 *   that is computed in.
 * - Nothing checks its arguments: who launches does.
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
  u64 tensor; /* its address; 0: this rank has none. Pack fills its place with the identity, unpack passes over it. */
  u64 offset; /* where it lies in the slab, in bytes: a multiple of its elements' size there, best of 16 */
  u64 bytes;  /* how many it takes in the slab; 0 is allowed */
};

/* What one block works on before it looks for the next piece: bytes of the slab. */
enum : u64 { TILE = 16384, VECTOR = 16 };

/* ---- memory: addresses are of the device's global memory, which a generic access would have to find out -------------------- */

union alignas(VECTOR) vector {
  u32 words[4];
};

#define ACCESS(T, suffix, constraint, R)                                                          \
  __device__ __forceinline__ void load(u64 at, T &x) {                                            \
    R value;                                                                                      \
    asm("ld.global." suffix " %0, [%1];" : "=" constraint(value) : "l"(at));                      \
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
  asm("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3])
      : "l"(at));
}
__device__ __forceinline__ void store(u64 at, const vector &x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(x.words[0]), "r"(x.words[1]), "r"(x.words[2]),
               "r"(x.words[3])
               : "memory");
}

/* `N` elements at a multiple of 16 bytes, by whole vectors. */
template <class T, u32 N>
union group {
  T elements[N];
  vector vectors[N * sizeof(T) / VECTOR];
};

template <class T, u32 N>
__device__ __forceinline__ void load(u64 at, group<T, N> &x) {
#pragma unroll
  for (u32 k = 0; k < N * sizeof(T) / VECTOR; k++) load(at + k * VECTOR, x.vectors[k]);
}

template <class T, u32 N>
__device__ __forceinline__ void store(u64 at, const group<T, N> &x) {
#pragma unroll
  for (u32 k = 0; k < N * sizeof(T) / VECTOR; k++) store(at + k * VECTOR, x.vectors[k]);
}

/* ---- numbers --------------------------------------------------------------------------------------------------------------- */

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

/* Round to nearest even; what is too large becomes an infinity. */
__device__ __forceinline__ void narrow(f32 x, f16 &half) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(x)); }
__device__ __forceinline__ void narrow(f32 x, bf16 &half) {
  u32 bits = __float_as_uint(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  half.bits = (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded;
}
__device__ __forceinline__ void narrow(f32 x, f32 &y) { y = x; }
__device__ __forceinline__ void narrow(f64 x, f64 &y) { y = x; }
/* float64 goes through float32 to a half. */
__device__ __forceinline__ void narrow(f64 x, f16 &half) { narrow((f32)x, half); }
__device__ __forceinline__ void narrow(f64 x, bf16 &half) { narrow((f32)x, half); }

/* What a dtype is accumulated and computed in. All integers share int64: a sum of narrow ones is exact for Average, and its low
 * bits are the sum that wraps. */
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

/* Divided, then multiplied. Integers are divided toward zero, and saturate. Below 2^52 a quotient of whole numbers that is not whole
 * lies further from the next whole number than it is rounded, so truncating the rounded quotient is exact; int64 goes beyond. */
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

/* A NaN wins whichever side it is on; of equal values the later rank's is taken. */
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

/* ---- pieces of one tensor: the threads of a block share them --------------------------------------------------------------- */

__device__ __forceinline__ u64 least(u64 x, u64 y) { return x < y ? x : y; }

/* Elements up to the next multiple of 16 bytes. */
template <class T>
__device__ __forceinline__ u64 up_to_aligned(u64 at) { return (-at & (VECTOR - 1)) / sizeof(T); }

template <class T>
__device__ __forceinline__ void copy_units(u64 to, u64 from, u64 count) {
  for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
    T x;
    load(from + i * sizeof(T), x);
    store(to + i * sizeof(T), x);
  }
}

/* By units of T, as many as are aligned; the bytes before and after them one by one. */
template <class T>
__device__ __forceinline__ void copy_by(u64 to, u64 from, u64 bytes) {
  u64 head = least(-to & (sizeof(T) - 1), bytes), whole = (bytes - head) / sizeof(T) * sizeof(T), tail = head + whole;
  if (sizeof(T) > 1) copy_units<u8>(to, from, head);
  copy_units<T>(to + head, from + head, whole / sizeof(T));
  if (sizeof(T) > 1) copy_units<u8>(to + tail, from + tail, bytes - tail);
}

/* By the widest unit that both sides can be aligned to. */
__device__ __forceinline__ void copy(u64 to, u64 from, u64 bytes) {
  u64 apart = (to ^ from) & (VECTOR - 1);
  if (apart == 0) copy_by<vector>(to, from, bytes);
  else if ((apart & 3) == 0) copy_by<u32>(to, from, bytes);
  else if ((apart & 1) == 0) copy_by<u16>(to, from, bytes);
  else copy_by<u8>(to, from, bytes);
}

template <class C, class To, class From>
__device__ __forceinline__ void convert(To &y, From x, f64 divisor, f64 factor) {
  narrow(finish<To>((C)widen(x), divisor, factor), y);
}
template <class C>
__device__ __forceinline__ void convert(b8 &y, b8 x, f64, f64) { y.byte = x.byte != 0; }

/* `count` elements of From become as many of To, computed in C. */
template <class C, class To, class From>
__device__ __forceinline__ void convert_all(u64 to, u64 from, u64 count, f64 divisor, f64 factor) {
  enum : u32 { N = VECTOR / (sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From)) };
  u64 head = sizeof(To) < sizeof(From) ? up_to_aligned<To>(to) : up_to_aligned<From>(from);
  bool aligned = ((to + head * sizeof(To) | from + head * sizeof(From)) & (VECTOR - 1)) == 0;
  head = aligned ? least(head, count) : count;
  u64 groups = (count - head) / N, tail = head + groups * N;
  for (u64 i = threadIdx.x; i < head + count - tail; i += blockDim.x) {
    u64 at = i < head ? i : i - head + tail;
    From x;
    To y;
    load(from + at * sizeof(From), x);
    convert<C>(y, x, divisor, factor);
    store(to + at * sizeof(To), y);
  }
  for (u64 i = threadIdx.x; i < groups; i += blockDim.x) {
    group<From, N> x;
    group<To, N> y;
    load(from + (head + i * N) * sizeof(From), x);
#pragma unroll
    for (u32 k = 0; k < N; k++) convert<C>(y.elements[k], x.elements[k], divisor, factor);
    store(to + (head + i * N) * sizeof(To), y);
  }
}

/* The identity, repeated to 8 bytes, from its byte `phase` on. */
__device__ __forceinline__ void fill(u64 to, u64 bytes, u64 identity, u64 phase) {
  u64 head = least(-to & 7, bytes), words = (bytes - head) / 8, tail = head + words * 8;
  u32 turn = 8 * ((phase + head) & 7);
  u64 turned = identity >> turn | identity << 1 << (63 - turn); /* a turn by 0 shifts by 64 */
  for (u64 i = threadIdx.x; i < words; i += blockDim.x) store(to + head + i * 8, turned);
  for (u64 i = threadIdx.x; i < head + bytes - tail; i += blockDim.x) {
    u64 at = i < head ? i : i - head + tail;
    store(to + at, (u8)(identity >> 8 * ((phase + at) & 7)));
  }
}

/* ---- plans: which piece of which tensor a block has ------------------------------------------------------------------------ */

/* Blocks take the slab's tiles in turn. Each is found in the table by bisection, and cut where tensors begin and end:
 * piece(row, first, bytes) has `bytes` bytes of the slab that begin `first` bytes after the row's first. */
template <class Piece>
__device__ __forceinline__ void for_each_piece(u64 table, u64 rows, Piece piece) {
  u64 offset, bytes, tensor;
  if (rows == 0) return;
  load(table + (rows - 1) * sizeof(row) + 8, offset);
  load(table + (rows - 1) * sizeof(row) + 16, bytes);
  u64 end = offset + bytes;
  for (u64 tile = blockIdx.x * TILE; tile < end; tile += gridDim.x * TILE) {
    u64 low = 0, high = rows; /* the last row that begins at the tile's start or before it is in [low, high) */
    while (high - low > 1) {
      u64 middle = low + (high - low) / 2;
      load(table + middle * sizeof(row) + 8, offset);
      if (offset <= tile) low = middle;
      else high = middle;
    }
    for (u64 r = low; r < rows; r++) {
      load(table + r * sizeof(row), tensor);
      load(table + r * sizeof(row) + 8, offset);
      load(table + r * sizeof(row) + 16, bytes);
      if (offset >= tile + TILE) break;
      u64 first = offset < tile ? tile - offset : 0, last = least(bytes, tile + TILE - offset);
      if (first < last) piece(row{tensor, offset, bytes}, first, last - first);
    }
  }
}

/* Pack: tensors of From to To in the slab. */
template <class C, class To, class From>
__device__ __forceinline__ void pack(u64 table, u64 rows, u64 slab, u64 identity, f64 divisor, f64 factor) {
  for_each_piece(table, rows, [=](row r, u64 first, u64 bytes) {
    u64 to = slab + r.offset + first, from = r.tensor + first / sizeof(To) * sizeof(From);
    if (r.tensor == 0) fill(to, bytes, identity, first);
    else convert_all<C, To, From>(to, from, bytes / sizeof(To), divisor, factor);
  });
}

/* And back. */
template <class C, class To, class From>
__device__ __forceinline__ void unpack(u64 table, u64 rows, u64 slab, f64 divisor, f64 factor) {
  for_each_piece(table, rows, [=](row r, u64 first, u64 bytes) {
    u64 from = slab + r.offset + first, to = r.tensor + first / sizeof(From) * sizeof(To);
    if (r.tensor != 0) convert_all<C, To, From>(to, from, bytes / sizeof(From), divisor, factor);
  });
}

/* ---- the ordered reduction: the parts of all ranks become one, in rank order ----------------------------------------------- */

/* Part k lies `k * stride` bytes after `parts`, but for part `own`, which lies at `own_part` (own = count: for none). The result
 * may be exactly one of the parts. */
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

/* Of bool Sum is whether any is true, and Product whether all are: the greatest and the least. */
__device__ __forceinline__ u32 op_of_bool(u32 op) { return op == SUM ? MAX : op == PRODUCT ? MIN : op; }

/* ---- what is launched ------------------------------------------------------------------------------------------------------ */

#define PACK(tensor, Tensor, wire, Wire, C)                                                                                     \
  extern "C" __global__ void pack_##tensor##_##wire(u64 table, u64 rows, u64 slab, u64 identity, f64 divisor, f64 factor) {     \
    pack<C, Wire, Tensor>(table, rows, slab, identity, divisor, factor);                                                        \
  }
#define BOTH_WAYS(tensor, Tensor, wire, Wire, C)                                                                                \
  PACK(tensor, Tensor, wire, Wire, C)                                                                                           \
  extern "C" __global__ void unpack_##tensor##_##wire(u64 table, u64 rows, u64 slab, f64 divisor, f64 factor) {                 \
    unpack<C, Tensor, Wire>(table, rows, slab, divisor, factor);                                                                \
  }
#define REDUCE(dtype, T, op_of)                                                                                                 \
  extern "C" __global__ void reduce_##dtype(u64 result, u64 parts, u64 stride, u64 own_part, u32 own, u32 count, u64 elements,  \
                                            u32 op, f64 divisor, f64 factor) {                                                  \
    reduce<T>(result, parts, stride, own_part, own, count, elements, op_of(op), divisor, factor);                               \
  }

/* Elements as they are, of any dtype. */
extern "C" __global__ void pack_bytes(u64 table, u64 rows, u64 slab, u64 identity) {
  for_each_piece(table, rows, [=](row r, u64 first, u64 bytes) {
    if (r.tensor == 0) fill(slab + r.offset + first, bytes, identity, first);
    else copy(slab + r.offset + first, r.tensor + first, bytes);
  });
}
extern "C" __global__ void unpack_bytes(u64 table, u64 rows, u64 slab) {
  for_each_piece(table, rows, [=](row r, u64 first, u64 bytes) {
    if (r.tensor != 0) copy(r.tensor + first, slab + r.offset + first, bytes);
  });
}

/* Any nonzero byte becomes 1, so that the greatest and the least of bytes are those of bool. Unpacked as bytes. */
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
