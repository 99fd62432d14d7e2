// Structs that Python fills in by name. A struct lists its fields as name, member and rule, side by side, so that no
// order of arguments can be wrong; its constructor in Python takes keywords only and refuses null addresses, negative
// sizes and numbers that are not finite.
#pragma once

#include <nanobind/nanobind.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace saccade {

struct Field {
    const char* name;
    void (*set)(void* to, PyObject* value, const Field& field);  // throws std::invalid_argument or Python's own error
    int64_t least = 0, most = INT64_MAX;                         // of an integer
    bool required = true, nullable = false;
    PyObject* key = nullptr;  // the interned name

    Field at_least(int64_t limit) const {
        Field f = *this;
        f.least = limit;
        return f;
    }
    Field within(int64_t low, int64_t high) const {
        Field f = at_least(low);
        f.most = high;
        return f;
    }
    Field signed_number() const { return at_least(INT64_MIN); }
    // An address that may be 0: there is none, or what lies there is empty.
    Field or_null() const {
        Field f = *this;
        f.nullable = true;
        return f;
    }
    // May be left out, and is then what T{} says.
    Field optional() const {
        Field f = or_null();
        f.required = false;
        return f;
    }
};

[[noreturn]] inline void refuse(const Field& f, const std::string& why) {
    throw std::invalid_argument(std::string(f.name) + why);
}

template <auto Member, class Struct>
struct SetMember;

template <class T, class M, M T::*Member, class Struct>
struct SetMember<Member, Struct> {
    static void set(void* to, PyObject* value, const Field& f) {
        using Whole = std::conditional_t<std::is_void_v<Struct>, T, Struct>;
        M& out = static_cast<Whole*>(to)->*Member;
        if constexpr (std::is_pointer_v<M>) {
            const unsigned long long address = PyLong_AsUnsignedLongLong(value);
            if (address == ~0ull && PyErr_Occurred()) throw nanobind::python_error();
            if (!address && !f.nullable) refuse(f, " must be an address, got 0");
            out = reinterpret_cast<M>(static_cast<uintptr_t>(address));
        } else if constexpr (std::is_same_v<M, bool>) {
            if (value != Py_True && value != Py_False) refuse(f, " must be True or False");
            out = value == Py_True;
        } else if constexpr (std::is_floating_point_v<M>) {
            const double x = PyFloat_AsDouble(value);
            if (x == -1 && PyErr_Occurred()) throw nanobind::python_error();
            if (std::isnan(x)) refuse(f, " must be a number, got nan");
            out = static_cast<M>(x);
        } else if constexpr (std::is_integral_v<M> || std::is_enum_v<M>) {
            const long long x = PyLong_AsLongLong(value);
            if (x == -1 && PyErr_Occurred()) throw nanobind::python_error();
            const int64_t most = sizeof(M) < 8 && f.most > INT32_MAX ? INT32_MAX : f.most;
            if (x < f.least || x > most)
                refuse(f, "=" + std::to_string(x) + " must be " +
                              (f.most == INT64_MAX ? "at least " + std::to_string(f.least)
                                                   : std::to_string(f.least) + " to " + std::to_string(f.most)));
            out = static_cast<M>(x);
        } else {
            if (!nanobind::isinstance<M>(nanobind::handle(value))) refuse(f, " is of another type");
            out = nanobind::cast<const M&>(nanobind::handle(value));
        }
    }
};

// field<&Struct::member>("name"), or field<&Struct::member, Struct>("name") for a member that Struct inherits.
template <auto Member, class Struct = void>
Field field(const char* name) {
    return Field{name, &SetMember<Member, Struct>::set};
}

// The fields of one struct, and what its values must say together.
template <class T>
struct Fields {
    static inline std::vector<Field> all;
    static inline const char* name = nullptr;
    static inline void (*check)(const T&) = nullptr;

    static PyObject* construct(PyObject* type, PyObject* const* args, size_t flags, PyObject* names) noexcept {
        try {
            if (PyVectorcall_NARGS(flags)) throw nanobind::type_error("takes keyword arguments only");
            nanobind::object made = nanobind::inst_alloc(type);
            T* to = new (nanobind::inst_ptr<T>(made)) T{};
            nanobind::inst_mark_ready(made);
            const size_t count = names ? static_cast<size_t>(PyTuple_GET_SIZE(names)) : 0;
            uint64_t given = 0;
            for (size_t i = 0; i < count; ++i) {
                const size_t at = find(PyTuple_GET_ITEM(names, i), i);
                all[at].set(to, args[i], all[at]);
                given |= uint64_t{1} << at;
            }
            for (size_t i = 0; i < all.size(); ++i)
                if (all[i].required && !(given >> i & 1)) refuse(all[i], " is missing");
            if (check) check(*to);
            return made.release().ptr();
        } catch (nanobind::python_error& e) {
            e.restore();
        } catch (const nanobind::builtin_exception& e) {
            PyErr_Format(PyExc_TypeError, "%s: %s", name, e.what());
        } catch (const std::exception& e) {
            PyErr_Format(PyExc_ValueError, "%s: %s", name, e.what());
        }
        return nullptr;
    }

  private:
    // Callers mostly name fields in their order: that one is looked at first.
    static size_t find(PyObject* key, size_t likely) {
        if (likely < all.size() && all[likely].key == key) return likely;
        for (size_t i = 0; i < all.size(); ++i)
            if (all[i].key == key) return i;
        for (size_t i = 0; i < all.size(); ++i)
            if (PyUnicode_Compare(all[i].key, key) == 0) return i;
        throw nanobind::type_error((std::string("has no field ") + PyUnicode_AsUTF8(key)).c_str());
    }
};

// Makes `T` known to Python under `name`.
template <class T>
void bind_struct(nanobind::module_& m, const char* name, std::vector<Field> fields, void (*check)(const T&) = nullptr) {
    static_assert(std::is_trivially_copyable_v<T>);
    for (Field& f : fields) f.key = PyUnicode_InternFromString(f.name);
    Fields<T>::all = std::move(fields);
    Fields<T>::name = name;
    Fields<T>::check = check;
    nanobind::class_<T> type(m, name, nanobind::is_final());
    // Before nanobind 2.12 Python did not ask a type for its vectorcall.
    reinterpret_cast<PyTypeObject*>(type.ptr())->tp_vectorcall = &Fields<T>::construct;
}

}  // namespace saccade
