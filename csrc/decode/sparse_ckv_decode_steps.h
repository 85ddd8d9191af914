// The steps of sparse_ckv_decode, for one instruction set. A source file includes this inside a namespace of its own,
// after VECTOR_BYTES is defined and the instruction set chosen.
//
// Everything here has internal linkage, and nothing from the standard library with a body in a header is called: an
// AVX-512 copy of a shared inline function could otherwise be the one that the linker keeps for every caller.

#define ALWAYS_INLINE static inline __attribute__((always_inline))

template <class Compute, int kBytes>
struct VectorOf {
  typedef Compute type __attribute__((vector_size(kBytes)));
};
template <class Compute>
using Vector = typename VectorOf<Compute, VECTOR_BYTES>::type;
template <class Compute>
constexpr int kLanes = VECTOR_BYTES / sizeof(Compute);

// Accumulators that the registers hold beside their operands: 16 of 32 vector registers, or 8 of 16.
constexpr int kBlockVectors = VECTOR_BYTES == 64 ? 4 : 2;

template <class To, class From>
ALWAYS_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T>
ALWAYS_INLINE T load(const void* address) {
  T value;
  __builtin_memcpy(&value, address, sizeof(value));
  return value;
}

// Branch-free conversions, so that loops over them vectorise. All of them are exact except the roundings to 16 bits.

ALWAYS_INLINE float from_bf16(uint16_t bits) { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

ALWAYS_INLINE float from_fp16(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fff;
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const float normal = bit_cast<float>((magnitude << 13) + ((127 - 15) << 23));
  const float special = bit_cast<float>((magnitude << 13) | 0x7f800000);
  const float value = magnitude < 0x0400 ? subnormal : magnitude < 0x7c00 ? normal : special;
  return bit_cast<float>(bit_cast<uint32_t>(value) | (static_cast<uint32_t>(bits & 0x8000) << 16));
}

ALWAYS_INLINE float from_e4m3(uint8_t code) {
  const uint32_t magnitude = code & 0x7f;
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  const float normal = bit_cast<float>((magnitude << 20) + ((127 - 7) << 23));
  const float value = magnitude < 0x08 ? subnormal : magnitude < 0x7f ? normal : __builtin_nanf("");
  return bit_cast<float>(bit_cast<uint32_t>(value) | (static_cast<uint32_t>(code & 0x80) << 24));
}

ALWAYS_INLINE float from_e2m1(uint8_t code) {
  const uint32_t magnitude = code & 7;
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0.5f;
  const float normal = bit_cast<float>((magnitude << 22) + ((127 - 1) << 23));
  const float value = magnitude < 2 ? subnormal : normal;
  return bit_cast<float>(bit_cast<uint32_t>(value) | (static_cast<uint32_t>(code & 8) << 28));
}

ALWAYS_INLINE uint16_t to_bf16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

ALWAYS_INLINE uint16_t to_fp16(float value) {
  const uint32_t bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t normal = (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 leaves the multiple of 2^-24 nearest to a subnormal in the last bits of the sum.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
  const uint32_t result = magnitude >= 0x477ff000 ? 0x7c00 : finite;
  return static_cast<uint16_t>(sign | (magnitude > 0x7f800000 ? 0x7e00 : result));
}

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87, where fp32 turns subnormal; NaN for NaN.
ALWAYS_INLINE float exp_of_nonpositive(float x) {
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, which is then in the low bits
  const float shifted = x * 0x1.715476p0f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;
  float e = 1.0f / 5040;
  e = e * r + 1.0f / 720;
  e = e * r + 1.0f / 120;
  e = e * r + 1.0f / 24;
  e = e * r + 1.0f / 6;
  e = e * r + 0.5f;
  e = e * r + 1.0f;
  e = e * r + 1.0f;
  const uint32_t exponent = bit_cast<uint32_t>(shifted) - bit_cast<uint32_t>(kRound) + 127;
  return x < -87.0f ? 0.0f : e * bit_cast<float>(exponent << 23);
}
ALWAYS_INLINE double exp_of_nonpositive(double x) { return __builtin_exp(x); }

template <class Compute, int kBytes>
ALWAYS_INLINE Compute sum_lanes(typename VectorOf<Compute, kBytes>::type vector) {
  if constexpr (kBytes == 16) {
    Compute sum = vector[0] + vector[1];
    if constexpr (sizeof(Compute) == 4) sum += vector[2] + vector[3];
    return sum;
  } else {
    typename VectorOf<Compute, kBytes / 2>::type halves[2];
    __builtin_memcpy(&halves, &vector, sizeof(vector));
    return sum_lanes<Compute, kBytes / 2>(halves[0] + halves[1]);
  }
}

static int padded_heads(int heads) { return (heads + kHeadsPerBlock - 1) / kHeadsPerBlock * kHeadsPerBlock; }

template <class Compute>
void load_query(const SparseCkvDecode& call, int64_t row, Compute* q) {
  const int64_t first = row * call.q_row_stride;
  const int count = call.heads * call.layout.query_dim;
  const auto* q16 = static_cast<const uint16_t*>(call.q) + first;
  const auto* q32 = static_cast<const float*>(call.q) + first;
  const auto* q64 = static_cast<const double*>(call.q) + first;
  switch (call.q_type) {
    case FloatType::kBf16:
      for (int i = 0; i < count; ++i) q[i] = from_bf16(q16[i]);
      break;
    case FloatType::kFp16:
      for (int i = 0; i < count; ++i) q[i] = from_fp16(q16[i]);
      break;
    case FloatType::kFp32:
      for (int i = 0; i < count; ++i) q[i] = q32[i];
      break;
    case FloatType::kFp64:
      for (int i = 0; i < count; ++i) q[i] = static_cast<Compute>(q64[i]);
      break;
  }
  for (int i = count; i < padded_heads(call.heads) * call.layout.query_dim; ++i) q[i] = 0;
}

template <class Compute>
void dequantise_latent(const RecordLayout& layout, const uint8_t* record, Compute* __restrict latent) {
  switch (layout.latent) {
    case Storage::kBf16:
      for (int i = 0; i < kLatentDim; ++i) latent[i] = from_bf16(load<uint16_t>(record + 2 * i));
      break;
    case Storage::kE4m3:
      for (int group = 0; group < kLatentDim / 128; ++group) {
        const Compute scale = load<float>(record + layout.scale_offset + 4 * group);
        for (int i = 128 * group; i < 128 * (group + 1); ++i) latent[i] = from_e4m3(record[i]) * scale;
      }
      break;
    case Storage::kE2m1: {
      const float stored = layout.token_scale_offset < 0 ? 1.0f : load<float>(record + layout.token_scale_offset);
      const Compute token_scale = stored == 0 ? 1.0f : stored;
      Compute scales[kLatentDim / 16];
      for (int group = 0; group < kLatentDim / 16; ++group) {
        scales[group] = from_e4m3(record[layout.scale_offset + group]);
      }
      // Codes first, scales after: a loop over groups with the decoding inside does not vectorise.
      for (int pair = 0; pair < kLatentDim / 2; ++pair) {
        latent[2 * pair] = from_e2m1(record[pair] & 15);
        latent[2 * pair + 1] = from_e2m1(record[pair] >> 4);
      }
      for (int group = 0; group < kLatentDim / 16; ++group) {
        for (int i = 16 * group; i < 16 * (group + 1); ++i) latent[i] = latent[i] * scales[group] * token_scale;
      }
      break;
    }
    case Storage::kNone:
      break;
  }
}

template <class Compute>
void dequantise_rope(const RecordLayout& layout, const uint8_t* record, Compute* __restrict rope) {
  const uint8_t* codes = record + layout.rope_offset;
  if (layout.rope == Storage::kBf16) {
    for (int i = 0; i < kRopeDim; ++i) rope[i] = from_bf16(load<uint16_t>(codes + 2 * i));
  } else if (layout.rope == Storage::kE4m3) {
    const Compute scale = load<float>(record + layout.rope_scale_offset);
    for (int i = 0; i < kRopeDim; ++i) rope[i] = from_e4m3(codes[i]) * scale;
  }
}

// scores[head, token] = softmax_scale * q[head] . keys[token], for whole blocks; tokens past `count` are overwritten
// with -inf.
template <class Compute>
void score_tile(const SparseCkvDecode& call, int count, const WorkerScratch<Compute>& scratch) {
  const int dim = call.layout.query_dim;
  const Compute softmax_scale = static_cast<Compute>(call.softmax_scale);
  for (int token = 0; token < count; token += kBlockVectors) {
    for (int head = 0; head < call.heads; head += kHeadsPerBlock) {
      Vector<Compute> sums[kHeadsPerBlock][kBlockVectors] = {};
      for (int d = 0; d < dim; d += kLanes<Compute>) {
        Vector<Compute> keys[kBlockVectors];
        for (int j = 0; j < kBlockVectors; ++j) {
          keys[j] = load<Vector<Compute>>(scratch.keys + (token + j) * kMaxQueryDim + d);
        }
        for (int i = 0; i < kHeadsPerBlock; ++i) {
          const auto q = load<Vector<Compute>>(scratch.q + (head + i) * dim + d);
          for (int j = 0; j < kBlockVectors; ++j) sums[i][j] += q * keys[j];
        }
      }
      for (int i = 0; i < kHeadsPerBlock; ++i) {
        for (int j = 0; j < kBlockVectors; ++j) {
          const Compute score = sum_lanes<Compute, VECTOR_BYTES>(sums[i][j]) * softmax_scale;
          scratch.scores[(head + i) * kTokensPerTile + token + j] = score;
        }
      }
    }
  }
  for (int head = 0; head < padded_heads(call.heads); ++head) {
    Compute* scores = scratch.scores + head * kTokensPerTile;
    for (int token = count; token < kTokensPerTile; ++token) scores[token] = static_cast<Compute>(-__builtin_inf());
  }
}

// Turns a head's scores into weights exp(score - max), folds them into `max` and `sum`, and returns the factor of what
// was accumulated under the old maximum.
template <class Compute>
Compute weigh_head(Compute* __restrict scores, Compute& max, Compute& sum) {
  auto maxima = load<Vector<Compute>>(scores);
  for (int token = kLanes<Compute>; token < kTokensPerTile; token += kLanes<Compute>) {
    const auto next = load<Vector<Compute>>(scores + token);
    maxima = next > maxima ? next : maxima;
  }
  const Compute old_max = max;
  Compute new_max = max;
  for (int lane = 0; lane < kLanes<Compute>; ++lane) new_max = maxima[lane] > new_max ? maxima[lane] : new_max;
  for (int token = 0; token < kTokensPerTile; ++token) scores[token] = exp_of_nonpositive(scores[token] - new_max);
  Vector<Compute> sums = {};
  for (int token = 0; token < kTokensPerTile; token += kLanes<Compute>) {
    sums += load<Vector<Compute>>(scores + token);
  }
  const Compute rescale = exp_of_nonpositive(old_max - new_max);
  max = new_max;
  sum = sum * rescale + sum_lanes<Compute, VECTOR_BYTES>(sums);
  return rescale;
}

// out[head] = out[head] * rescale[head] + sum over tokens of weight[head, token] * latent[token].
template <class Compute>
void accumulate_tile(int heads, int count, const WorkerScratch<Compute>& scratch, const Compute* rescale,
                     Compute* out) {
  constexpr int kBlockDim = kBlockVectors * kLanes<Compute>;
  for (int d = 0; d < kLatentDim; d += kBlockDim) {
    for (int head = 0; head < heads; head += kHeadsPerBlock) {
      Vector<Compute> sums[kHeadsPerBlock][kBlockVectors];
      for (int i = 0; i < kHeadsPerBlock; ++i) {
        for (int j = 0; j < kBlockVectors; ++j) {
          const Compute* accumulated = out + (head + i) * kLatentDim + d + j * kLanes<Compute>;
          sums[i][j] = load<Vector<Compute>>(accumulated) * rescale[head + i];
        }
      }
      const Compute* weights = scratch.scores + head * kTokensPerTile;
      for (int token = 0; token < count; ++token) {
        Vector<Compute> latent[kBlockVectors];
        for (int j = 0; j < kBlockVectors; ++j) {
          latent[j] = load<Vector<Compute>>(scratch.keys + token * kMaxQueryDim + d + j * kLanes<Compute>);
        }
        for (int i = 0; i < kHeadsPerBlock; ++i) {
          const Compute weight = weights[i * kTokensPerTile + token];
          for (int j = 0; j < kBlockVectors; ++j) sums[i][j] += latent[j] * weight;
        }
      }
      for (int i = 0; i < kHeadsPerBlock; ++i) {
        __builtin_memcpy(out + (head + i) * kLatentDim + d, sums[i], sizeof(sums[i]));
      }
    }
  }
}

template <class Compute>
void attend_part(const SparseCkvDecode& call, int64_t row, int part, const WorkerScratch<Compute>& scratch,
                 const PartialAttention<Compute>& result) {
  const int heads = padded_heads(call.heads);
  const int length = !call.lengths || call.lengths[row] > call.topk ? call.topk : call.lengths[row];
  const int first = part * kColumnsPerPart;
  const int end = length < first + kColumnsPerPart ? length : first + kColumnsPerPart;
  const uint8_t* records[kColumnsPerPart];
  int count = 0;
  for (int column = first; column < end; ++column) {
    const int64_t slot = call.indices[row * call.indices_row_stride + column];
    if (slot < 0 || slot >= call.num_slots) continue;
    const int64_t page = slot / call.page_size;
    records[count++] = call.cache + page * call.page_stride + (slot - page * call.page_size) * call.layout.record_bytes;
  }
  for (int head = 0; head < heads; ++head) {
    result.max[head] = static_cast<Compute>(-__builtin_inf());
    result.sum[head] = 0;
  }
  for (int i = 0; i < heads * kLatentDim; ++i) result.out[i] = 0;
  for (int tile = 0; tile < count; tile += kTokensPerTile) {
    const int tokens = count - tile < kTokensPerTile ? count - tile : kTokensPerTile;
    for (int token = 0; token < tokens; ++token) {
      Compute* key = scratch.keys + token * kMaxQueryDim;
      dequantise_latent(call.layout, records[tile + token], key);
      dequantise_rope(call.layout, records[tile + token], key + kLatentDim);
    }
    score_tile(call, tokens, scratch);
    Compute rescale[128];
    for (int head = 0; head < heads; ++head) {
      rescale[head] = weigh_head(scratch.scores + head * kTokensPerTile, result.max[head], result.sum[head]);
    }
    accumulate_tile(heads, tokens, scratch, rescale, result.out);
  }
}

template <class Compute>
void merge_part(const PartialAttention<Compute>& part, int heads, const PartialAttention<Compute>& merged) {
  for (int head = 0; head < heads; ++head) {
    if (part.sum[head] == 0) continue;
    const Compute max = part.max[head] > merged.max[head] ? part.max[head] : merged.max[head];
    const Compute part_weight = exp_of_nonpositive(part.max[head] - max);
    const Compute merged_weight = exp_of_nonpositive(merged.max[head] - max);
    merged.max[head] = max;
    merged.sum[head] = merged.sum[head] * merged_weight + part.sum[head] * part_weight;
    const Compute* __restrict from = part.out + head * kLatentDim;
    Compute* __restrict to = merged.out + head * kLatentDim;
    for (int d = 0; d < kLatentDim; ++d) to[d] = to[d] * merged_weight + from[d] * part_weight;
  }
}

template <class Compute>
void store_row(const SparseCkvDecode& call, int64_t row, const PartialAttention<Compute>& merged) {
  for (int head = 0; head < call.heads; ++head) {
    const int64_t position = row * call.heads + head;
    const Compute sum = merged.sum[head];
    const bool empty = sum == 0;
    const Compute lse =
        empty ? static_cast<Compute>(-__builtin_inf()) : merged.max[head] + static_cast<Compute>(__builtin_log(sum));
    Compute factor = empty ? 0 : 1 / sum;
    if (call.sink && !empty) factor /= 1 + static_cast<Compute>(__builtin_exp(call.sink[head] - lse));
    static_cast<Compute*>(call.lse)[position] = lse;
    const Compute* from = merged.out + head * kLatentDim;
    auto* out16 = static_cast<uint16_t*>(call.out) + position * kLatentDim;
    auto* out32 = static_cast<float*>(call.out) + position * kLatentDim;
    auto* out64 = static_cast<double*>(call.out) + position * kLatentDim;
    switch (call.out_type) {
      case FloatType::kBf16:
        for (int d = 0; d < kLatentDim; ++d) out16[d] = to_bf16(static_cast<float>(from[d] * factor));
        break;
      case FloatType::kFp16:
        for (int d = 0; d < kLatentDim; ++d) out16[d] = to_fp16(static_cast<float>(from[d] * factor));
        break;
      case FloatType::kFp32:
        for (int d = 0; d < kLatentDim; ++d) out32[d] = static_cast<float>(from[d] * factor);
        break;
      case FloatType::kFp64:
        for (int d = 0; d < kLatentDim; ++d) out64[d] = from[d] * factor;
        break;
    }
  }
}

template <class Compute>
constexpr DecodeSteps<Compute> kSteps = {load_query<Compute>, attend_part<Compute>, merge_part<Compute>,
                                         store_row<Compute>};
