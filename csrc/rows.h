// What a decoder layer of the Llama shape does to a few rows besides attention: products with weight matrices, and
// between them what row_values.h has. Every weight is read once for all rows, in order, and a row's result does not
// depend on how many rows there are but for whether tiles multiply (row_tiles.h). Values are rounded to the storage type
// wherever the layer's own modules would round them.
#pragma once

#include "row_tiles.h"
#include "row_values.h"

namespace saccade {
namespace {

const PlaneKernels& own_planes();  // of the translation unit's instruction set

namespace layer {

// Bytes of a row of a matrix.
template <class T>
int64_t row_bytes(const RowMatrix& m, int64_t in) {
    if (m.format == WeightFormat::plain) return in * static_cast<int64_t>(sizeof(T));
    return group_bytes(plane_traits(m.format), in) / kGroupRows;
}

// over_rows for weights of `in` channels. What an output is must not hang on where tasks begin: tiles and groups are
// whole ones.
template <class T, bool Tiles, class Work>
void over_weights(const RowMatrix* m, int pieces, int64_t in, int threads, bool follows, const Work& work,
                  int64_t step = kTaskRows) {
    int64_t sizes[3], bytes = 1;
    if (Tiles) step = std::max<int64_t>(step, kTileKeys);
    static_assert(kTileKeys % kGroupRows == 0 && kGroupRows % kTaskRows == 0);
    for (int p = 0; p < pieces; ++p) {
        sizes[p] = m[p].rows;
        bytes = std::max(bytes, row_bytes<T>(m[p], in));
        if (m[p].format != WeightFormat::plain) step = std::max(step, kGroupRows);
    }
    over_rows(sizes, pieces, bytes, step, threads, follows, work);
}

// Which kinds of weights are multiplied by the same x.
struct Uses {
    bool plain = false, coded = false;

    template <class T, class... Matrices>
    static Uses of(const Matrices&... m) {
        Uses uses;
        const bool codes = std::is_same_v<T, uint16_t>;
        ((m.format != WeightFormat::plain && codes ? uses.coded = true : uses.plain = true), ...);
        return uses;
    }
};

// Room of a call for x as products take it: values or columns of tiles, and codes.
struct OperandRoom {
    float* values;
    CodedBlock* codes;
};

template <class T, bool Tiles>
OperandRoom take_room(Carver& take, int64_t rows, int64_t in, bool coded) {
    return {take.take<float>(Tiles ? tile_room(rows, in) : rows * in),
            take.take<CodedBlock>(coded ? rows * (in / kBlock) : 0)};
}

// x [rows, in] as products take it.
template <class T, bool Tiles>
Operand<T> operand(const T* x, int64_t rows, int64_t in, const OperandRoom& room, int threads, Uses uses) {
    Operand<T> made{};
    if (uses.plain) {
        if constexpr (Tiles) made = packed(x, rows, in, room.values, threads);
        else made.x = values<T>(x, rows * in, room.values);
    }
    if (uses.coded) {
        over_parts(rows, in, threads, [&](int64_t first, int64_t last) {
            for (int64_t r = first; r < last; ++r) code_row(x + r * in, in, room.codes + r * (in / kBlock));
        });
        made.codes = room.codes;
    }
    return made;
}

template <bool Tiles, class T, class Y>
void multiply(const RowMatrix& m, int64_t in, const Operand<T>& x, int64_t rows, int64_t first, int64_t last, Y* y,
              int64_t stride) {
    if (m.format != WeightFormat::plain) {
        constexpr bool fp32 = std::is_same_v<T, float>;
        const void* from = x.codes;
        if constexpr (fp32) from = x.x;
        return own_planes().task({fp32 ? Storage::fp32 : Storage::bf16, &m, in, from, rows, first, last, y, stride,
                           std::is_same_v<Y, float>});
    }
    if constexpr (Tiles)
        if (x.columns) first = multiply_tiles(m, in, x, rows, first, last, y, stride);
    multiply_rows<T>(m, in, x.x, rows, first, last, y, stride);
}

// The call's rows, normed, as operand of a product; they stay in the thread's scratch.
template <class T, bool Tiles, class Call>
Operand<T> normed_operand(const Call& c, Uses uses) {
    auto carve = [&](Carver& take) {
        T* x = take.template take<T>(c.rows * c.channels);
        return std::pair<T*, OperandRoom>(x, take_room<T, Tiles>(take, c.rows, c.channels, uses.coded));
    };
    auto [x, room] = in_scratch(carve);
    norm_rows<T>(c.hidden, c.norm, c.epsilon, c.rows, c.channels, c.threads, x);
    return operand<T, Tiles>(x, c.rows, c.channels, room, c.threads, uses);
}

template <class T, bool Tiles = false>
void project_rows_typed(const ProjectRows& c) {
    const Operand<T> x = normed_operand<T, Tiles>(c, Uses::of<T>(c.parts[0], c.parts[1], c.parts[2]));
    const int64_t sizes[3] = {c.parts[0].rows, c.parts[1].rows, c.parts[2].rows};
    over_weights<T, Tiles>(c.parts, 3, c.channels, c.threads, true, [&](int part, int64_t first, int64_t last) {
        multiply<Tiles, T>(c.parts[part], c.channels, x, c.rows, first, last, static_cast<T*>(c.out[part]),
                           sizes[part]);
    });
    const int64_t turned = 2 * (sizes[0] + sizes[1]);  // which takes longer than to add
    over_parts(c.rows, turned, c.threads, [&](int64_t first, int64_t last) {
        for (int part = 0; part < 2; ++part) {
            T* out = static_cast<T*>(c.out[part]);
            const T* norm = static_cast<const T*>(c.head_norms[part]);
            for (int64_t r = first; r < last; ++r)
                for (int64_t at = 0; at < sizes[part]; at += c.head_dim) {
                    T* head = out + r * sizes[part] + at;
                    if (norm) rms_norm<T>(head, norm, c.head_epsilon, c.head_dim, head);
                    if (c.cos)
                        rotate<T>(head, static_cast<const T*>(c.cos) + r * c.head_dim,
                                  static_cast<const T*>(c.sin) + r * c.head_dim, c.head_dim);
                }
        }
    });
}

template <class T, bool Tiles = false>
void finish_rows_typed(const FinishRows& c) {
    const int64_t rows = c.rows, n = c.channels, inner = c.gate.rows;
    struct Room {
        T *x, *y, *gate, *up;
        OperandRoom wide;
        CodedBlock* inner;
    };
    const Uses output = Uses::of<T>(c.output), gates = Uses::of<T>(c.gate, c.up), down = Uses::of<T>(c.down);
    auto carve = [&](Carver& take) {
        Room room;
        room.x = take.template take<T>(rows * n);
        room.y = take.template take<T>(rows * n);
        room.gate = take.template take<T>(rows * inner);
        room.up = take.template take<T>(rows * inner);
        room.wide = take_room<T, Tiles>(take, rows, std::max(std::max(inner, n), c.attended_channels),
                                        output.coded || gates.coded);
        room.inner = take.template take<CodedBlock>(down.coded ? rows * (inner / kBlock) : 0);
        return room;
    };
    Room room = in_scratch(carve);
    T* hidden = static_cast<T*>(c.hidden);
    const auto taken = [&](const T* from, int64_t in, Uses uses) {
        return operand<T, Tiles>(from, rows, in, room.wide, c.threads, uses);
    };
    Operand<T> x = taken(static_cast<const T*>(c.attended), c.attended_channels, output);
    over_weights<T, Tiles>(&c.output, 1, c.attended_channels, c.threads, true, [&](int, int64_t first, int64_t last) {
        multiply<Tiles, T>(c.output, c.attended_channels, x, rows, first, last, room.y, n);
    });
    over_parts(rows, n, c.threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r)
            add_norm<T>(hidden + r * n, room.y + r * n, static_cast<const T*>(c.norm), c.epsilon, n, room.x + r * n);
    });
    x = taken(room.x, n, gates);
    // Whole vectors, whose lanes are others' than single values' activations, and whole blocks of codes.
    static_assert(kGroupRows % W == 0 && kTileKeys % kBlock == 0);
    const auto gate = [&](int, int64_t first, int64_t last) {
        multiply<Tiles, T>(c.gate, n, x, rows, first, last, room.gate, inner);
        multiply<Tiles, T>(c.up, n, x, rows, first, last, room.up, inner);
        for (int64_t r = 0; r < rows; ++r) {
            T* own = room.gate + r * inner + first;
            gated<T>(own, room.up + r * inner + first, last - first);
            if (down.coded) code_row(own, last - first, room.inner + (r * inner + first) / kBlock);
        }
    };
    over_weights<T, Tiles>(&c.gate, 1, n, c.threads, true, gate, down.coded ? kBlock : kGroupRows);
    if (down.coded) x.codes = room.inner;
    else x = taken(room.gate, inner, down);
    over_weights<T, Tiles>(&c.down, 1, inner, c.threads, true, [&](int, int64_t first, int64_t last) {
        multiply<Tiles, T>(c.down, inner, x, rows, first, last, room.y, n);
    });
    over_parts(rows, n, c.threads, [&](int64_t first, int64_t last) {
        add_rows<T>(hidden + first * n, room.y + first * n, (last - first) * n);
    });
}

template <class T, bool Tiles = false>
void head_rows_typed(const HeadRows& c) {
    const Operand<T> x = normed_operand<T, Tiles>(c, Uses::of<T>(c.head));
    over_weights<T, Tiles>(&c.head, 1, c.channels, c.threads, false, [&](int, int64_t first, int64_t last) {
        multiply<Tiles, T>(c.head, c.channels, x, c.rows, first, last, c.out, c.head.rows);
    });
}

template <class T, bool Tiles = false>
void product_rows_typed(const ProductRows& c) {
    const Uses uses = Uses::of<T>(c.matrix);
    const OperandRoom room =
        in_scratch([&](Carver& take) { return take_room<T, Tiles>(take, c.rows, c.channels, uses.coded); });
    const Operand<T> x = operand<T, Tiles>(static_cast<const T*>(c.x), c.rows, c.channels, room, c.threads, uses);
    over_weights<T, Tiles>(&c.matrix, 1, c.channels, c.threads, false, [&](int, int64_t first, int64_t last) {
        multiply<Tiles, T>(c.matrix, c.channels, x, c.rows, first, last, static_cast<T*>(c.out), c.matrix.rows);
    });
}

}  // namespace layer
}  // namespace
}  // namespace saccade
