// What the files that make up the module share: addresses to pointers, kernel sets by number, the geometry of a call.
#pragma once

#include <nanobind/nanobind.h>

#include <stdexcept>

#include "kernels.h"

namespace saccade {

template <typename T>
inline T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

inline const KernelSet& kernels(int index) {
    int count = 0;
    const KernelSet* const* sets = supported_kernels(&count);
    if (index < 0 || index >= count) throw std::out_of_range("no such kernel set");
    return *sets[index];
}

// What every call says about its queries and keys: the order is that of _geometry() in saccade/ops/cpu.py.
inline Attention geometry(int threads, int storage, uintptr_t q, int64_t q_head_stride, int64_t q_row_stride,
                          uintptr_t k_pool, uintptr_t v_pool, uintptr_t table, int64_t heads, int64_t kv_heads,
                          int64_t head_dim, int64_t page, int64_t q_len, int64_t q_start, double scale,
                          double softcap) {
    Attention a{};
    a.threads = threads;
    a.storage = static_cast<Storage>(storage);
    a.q = pointer<const void>(q);
    a.q_head_stride = q_head_stride;
    a.q_row_stride = q_row_stride;
    a.k_pool = pointer<const void>(k_pool);
    a.v_pool = pointer<const void>(v_pool);
    a.table = pointer<const int32_t>(table);
    a.heads = heads;
    a.kv_heads = kv_heads;
    a.head_dim = head_dim;
    a.page = page;
    a.q_len = q_len;
    a.q_start = q_start;
    a.scale = static_cast<float>(scale);
    a.softcap = static_cast<float>(softcap);
    return a;
}

// The parts of the module in bindings_decode.cpp, bindings_blocks.cpp and sharing.cpp.
void bind_decode(nanobind::module_& m);
void bind_rows(nanobind::module_& m);  // bindings_rows.cpp
void bind_blocks(nanobind::module_& m);
void bind_sharing(nanobind::module_& m);
void bind_row_passes(nanobind::module_& m);
void bind_shares(nanobind::module_& m);

}  // namespace saccade
