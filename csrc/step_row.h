// One row of a decode step as the kernels know it before the step runs: where it is stored, and what each layer reads.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <memory>
#include <vector>

#include "choosing.h"
#include "keeping_row.h"
#include "listing.h"
#include "resolving.h"
#include "row_work.h"
#include "sharing_row.h"

namespace saccade {

// A row, or `count` rows one after the other that read everything: `table` is layer 0's, the next layer's lies
// `layer_stride` entries on.
struct StepRow : BlockTable {
    int64_t row, q_start, layer_stride, count = 1;

    BlockTable at(int64_t layer) const {
        BlockTable own = *this;
        own.table += layer * layer_stride;
        return own;
    }
};

enum class RowKind { elsewhere, reads, reads_few, chooses, resolves, guesses, lists, shares, keeps };

// What one layer reads: a ReadKeys, BlockChoice, LabelKeys, ListedLayer, SharedLayer or KeptLayer that Python holds.
struct LayerReading {
    RowKind kind = RowKind::elsewhere;
    const void* what = nullptr;

    template <class T>
    const T& as() const {
        return *static_cast<const T*>(what);
    }
};

struct PlannedRow {
    StepRow where;
    std::vector<LayerReading> layers;
    nanobind::object held;      // what they point to
    const void* how = nullptr;  // of all layers, a BlockChoice, ListedKeys, SharedKeys or KeptKeys
    int64_t steps = 0;          // that lists have learnt from on top of what their layers say
    // By layer, where blocks are chosen by summaries; where a rule notes what it let in, `units` numbers a layer.
    std::vector<uintptr_t> summaries;
    std::vector<int64_t> summarized;
    std::vector<BlockCodes> codes;
    int64_t* used = nullptr;
    float* coverage = nullptr;
    int64_t units = 0;
    const int32_t* carried = nullptr;  // [layers, carrying units, carries]
    int64_t carrying = 0, carries = 0;
    Residence home;  // of a row whose blocks are not all resident
    float* peaks = nullptr;  // [layers, count, kv_heads, regions] of a row that is several
    int64_t region = 0, regions = 0;
    char* asked = nullptr;  // where layer 0 puts its queries [heads, head_dim], the next layer `asked_stride` bytes on
    int64_t asked_stride = 0;

    std::unique_ptr<RowWork> work;  // of the layer that runs, and of the next one of its kind
    RowKind worked = RowKind::elsewhere;
    int64_t keys = 0;  // that the layer at hand makes it read, about

    template <class Work>
    Work& working(RowKind kind) {
        if (worked != kind) work = std::make_unique<Work>(), worked = kind;
        return static_cast<Work&>(*work);
    }

    ListedLayer listed_by(int64_t layer) const {
        ListedLayer own = layers[layer].as<ListedLayer>();
        own.steps += steps;
        if (summaries.empty()) return own;
        own.summary = reinterpret_cast<const void*>(summaries[layer]);
        own.summarized = summarized[layer];
        return own;
    }

    // The row's call `a` at `layer` is about to run, with the keys of the step's rows in `fresh`.
    void begin(int64_t layer, const Attention& a, const NewRows& fresh) {
        const LayerReading& own = layers[layer];
        keys = a.q_start + 1;
        if (asked) note_queries(layer, a);
        switch (own.kind) {
            case RowKind::elsewhere: break;
            case RowKind::reads: {
                Reading& reading = working<Reading>(own.kind);
                reading.begin(a, own.as<ReadKeys>());
                keys = reading.keys();
                break;
            }
            case RowKind::reads_few: {
                const int64_t each = where.count * a.kv_heads * regions;
                ReadingFew& reading = working<ReadingFew>(own.kind);
                reading.begin(a, own.as<ReadKeys>(), peaks ? peaks + layer * each : nullptr, region, regions);
                keys = reading.keys();
                break;
            }
            case RowKind::chooses:
                working<Choosing>(own.kind).begin(a, own.as<BlockChoice>(), choosing_by(layer));
                break;
            case RowKind::resolves:
                working<Resolving>(own.kind)
                    .begin(a, own.as<BlockChoice>(), choosing_by(layer), home, layer, fresh, where.row);
                break;
            case RowKind::guesses:
                working<Choosing>(own.kind).begin(a, *static_cast<const BlockChoice*>(how), guessing_by(layer));
                break;
            case RowKind::lists:
                working<Listing>(own.kind).begin(a, *static_cast<const ListedKeys*>(how), listed_by(layer));
                break;
            case RowKind::shares:
                working<Sharing>(own.kind).begin(a, *static_cast<const SharedKeys*>(how), own.as<SharedLayer>());
                break;
            case RowKind::keeps:
                working<Keeping>(own.kind).begin(a, *static_cast<const KeptKeys*>(how), own.as<KeptLayer>());
                break;
        }
    }

  private:
    void note_queries(int64_t layer, const Attention& a) const {
        const int64_t width = a.head_dim * (a.storage == Storage::bf16 ? 2 : 4);
        const int64_t from = a.q_head_stride * (a.storage == Storage::bf16 ? 2 : 4);
        for (int64_t h = 0; h < a.heads; ++h)
            std::memcpy(asked + layer * asked_stride + h * width, static_cast<const char*>(a.q) + h * from, width);
    }

    ChoosingLayer guessing_by(int64_t layer) const {
        ChoosingLayer own{nullptr, 0, used + layer * units, coverage + layer * units};
        own.labels = &layers[layer].as<LabelKeys>();
        return own;
    }
    ChoosingLayer choosing_by(int64_t layer) const {
        const bool carry = carried && layers[layer].as<BlockChoice>().units == carrying;
        return {reinterpret_cast<const void*>(summaries[layer]), summarized[layer],
                used ? used + layer * units : nullptr, coverage ? coverage + layer * units : nullptr,
                codes.empty() ? BlockCodes{} : codes[layer],
                carry ? carried + layer * carrying * carries : nullptr, carry ? carries : 0};
    }
};

}  // namespace saccade
