// Packs quantised weights into planes (plane_formats.h) as they are loaded: each byte is read once.
#include <algorithm>

#include "plane_pack.h"
#include "planes.h"
#include "threads.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace saccade {
namespace {

uint32_t word(const uint8_t* p) {
    uint32_t x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
void put_word(uint8_t* p, uint32_t x) { std::memcpy(p, &x, sizeof x); }

// Row r's 32 codes, to a block of zeros.
template <int Bits>
void put_codes(const uint8_t* codes, uint8_t* block, int64_t r) {
    constexpr int64_t second = Bits >= 4 ? 256 : 128;
    if constexpr (Bits == 8)
        for (int k = 0; k < 8; ++k) put_word(block + 64 * k + 4 * r, word(codes + 4 * k));
    if constexpr (Bits >= 4 && Bits < 8)
        for (int c = 0; c < 4; ++c)
            put_word(block + 64 * c + 4 * r,
                     (word(codes + 4 * c) & 0x0f0f0f0f) | (word(codes + 16 + 4 * c) & 0x0f0f0f0f) << 4);
    if constexpr (Bits == 2 || Bits == 3 || Bits == 6)
        for (int half = 0; half < 2; ++half) {
            uint32_t all = 0;
            for (int c = 0; c < 4; ++c)
                all |= (word(codes + 16 * half + 4 * c) >> (Bits == 6 ? 4 : 0) & 0x03030303) << 2 * c;
            put_word(block + (Bits == 6 ? second : 0) + 64 * half + 4 * r, all);
        }
    if constexpr (Bits == 3 || Bits == 5)
        for (int k = 0; k < 8; ++k) {
            const uint32_t m = word(codes + 4 * k) >> (Bits - 1) & 0x01010101;
            const uint32_t four = (m | m >> 7 | m >> 14 | m >> 21) & 15;
            block[second + 8 * k + r / 2] |= static_cast<uint8_t>(four << r % 2 * 4);
        }
}

template <class P>
void pack_group(const PackCall& c, int64_t group) {
    const int64_t records = c.channels / (kBlock * P::blocks), bytes = stored_bytes(P::format);
    const int64_t first = group * kGroupRows, rows = std::min(c.rows - first, kGroupRows);
    uint8_t* record = c.planes + group * records * P::bytes;
    for (int64_t i = 0; i < records; ++i, record += P::bytes) {
        std::memset(record, 0, P::bytes);
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = (first + r) * records + i;
            const StoredBlock stored{c.from + at * bytes, c.scales ? c.scales + 2 * at : nullptr,
                                     c.zeros ? c.zeros + at : nullptr};
            put_scales<P::format>(stored, record, r);
            for (int b = 0; b < P::blocks; ++b) {
                uint8_t codes[kBlock];
                stored_codes<P::format>(stored.at, b, codes);
                put_codes<P::bits>(codes, record + P::front + b * P::block_bytes, r);
            }
        }
    }
}

}  // namespace

void pack_planes(const PackCall& call) {
    parallel_for(
        (call.rows + kGroupRows - 1) / kGroupRows, call.threads,
        [](void* data, int64_t group) {
            const PackCall& c = *static_cast<const PackCall*>(data);
            with_plane(c.format, [&](auto plane) { pack_group<decltype(plane)>(c, group); });
        },
        const_cast<PackCall*>(&call));
}

void drop_pages(const void* from, int64_t bytes) {
#if defined(__linux__)
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(from);
    const uintptr_t first = (at + page - 1) / page * page, last = (at + static_cast<uintptr_t>(bytes)) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#else
    static_cast<void>(from), static_cast<void>(bytes);
#endif
}

}  // namespace saccade
