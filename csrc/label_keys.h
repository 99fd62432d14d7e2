// Makes labels of keys: a few channels of each, quantized to a few bits from the least of them to the greatest.
#pragma once

#include "key_rows.h"
#include "label_scores.h"

namespace saccade {
namespace {

template <class T>
void label_head(const LabelKeys& c, int64_t kv_head) {
    const int64_t planes = c.bits <= 4 ? (c.channels + 1) / 2 : c.channels;
    const KeyRows rows(c.kv, kv_head);
    const int64_t* channel = c.channel + kv_head * c.channels;
    const float* mean = c.frame ? c.frame + kv_head * c.channels : nullptr;
    const float* deviation = c.frame ? mean + c.kv.kv_heads * c.channels : nullptr;
    const float levels = static_cast<float>((1 << c.bits) - 1);
    uint8_t* codes = c.codes + (kv_head * c.tiles + c.first / kLabelTile) * planes * kLabelTile;
    float* range = c.range + (kv_head * c.tiles + c.first / kLabelTile) * 2 * kLabelTile;
    const KeyReader<T> keys(c.kv);
    typename RowReader<T>::Room room;
    float* x = nullptr;
    const auto carve = [&](Carver carver) {
        x = carver.take<float>(c.channels);
        room = keys.carve(carver, 1);
        return carver.used();
    };
    carve(Carver(static_cast<char*>(thread_scratch(carve(Carver(nullptr))))));
    for (int64_t start = c.first; start < c.last; start += kLabelTile) {
        std::memset(codes, 0, planes * kLabelTile);
        std::memset(range, 0, 2 * kLabelTile * sizeof(float));
        for (int64_t lane = 0; lane < kLabelTile && start + lane < c.last; ++lane) {
            const T* key = keys.read(rows(start + lane), room);
            float low = __builtin_inff(), high = -__builtin_inff();
            for (int64_t n = 0; n < c.channels; ++n) {
                if constexpr (sizeof(T) == 2) {
                    const uint32_t bits = static_cast<uint32_t>(key[channel[n]]) << 16;
                    std::memcpy(x + n, &bits, sizeof bits);
                } else {
                    x[n] = key[channel[n]];
                }
                if (mean) x[n] = (x[n] - mean[n]) / deviation[n];
                low = x[n] < low ? x[n] : low;
                high = x[n] > high ? x[n] : high;
            }
            const float step = (high - low) / levels, divisor = step > 1.17549435e-38f ? step : 1.17549435e-38f;
            range[lane] = low;
            range[kLabelTile + lane] = step;
            for (int64_t n = 0; n < c.channels; ++n) {
                const uint8_t code = static_cast<uint8_t>(__builtin_nearbyintf((x[n] - low) / divisor));
                if (c.bits > 4) codes[n * kLabelTile + lane] = code;
                else codes[n / 2 * kLabelTile + lane] |= static_cast<uint8_t>(code << (n % 2 * 4));
            }
        }
        codes += planes * kLabelTile;
        range += 2 * kLabelTile;
    }
}

void label_keys(const LabelKeys& c) {
    parallel_for(
        c.kv.kv_heads, c.threads,
        [](void* context, int64_t i) {
            const LabelKeys& call = *static_cast<const LabelKeys*>(context);
            if (call.kv.storage == Storage::bf16) label_head<uint16_t>(call, i);
            else label_head<float>(call, i);
        },
        const_cast<LabelKeys*>(&c));
}

}  // namespace
}  // namespace saccade
