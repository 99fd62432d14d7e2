// Weights in blocks along the rows of a matrix, as GGUF files hold them (saccade/ops/block_weights.py): how a block of each
// format becomes fp32 values.
#pragma once

#include <cstdint>

#include "half.h"

namespace saccade {

// How a matrix is stored: in the storage type of the call, or in blocks.
enum class WeightFormat : int { plain = 0, q8_0 = 1, count };

// 32 signed bytes behind a half-precision number by which they are multiplied. S: the vectors of an instruction set.
template <class S>
struct Q8_0 {
    static constexpr int64_t weights = 32, bytes = 34;

    static typename S::F scale(const uint8_t* block) { return S::set1(from_ieee_half(block)); }
    // Values of a block from weight i on, a vector of them. The products are exact in fp32.
    static typename S::F values(const uint8_t* block, typename S::F scale, int64_t i) {
        return S::mul(scale, S::to_float(S::load_signed(reinterpret_cast<const int8_t*>(block + 2) + i)));
    }
};

// Calls work(Format{}) for a matrix in blocks. A format is a line here.
template <class S, class Work>
void with_blocks(WeightFormat format, Work&& work) {
    switch (format) {
        case WeightFormat::q8_0: return work(Q8_0<S>{});
        default: return;
    }
}

}  // namespace saccade
