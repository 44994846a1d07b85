// moet._core: the door between Python and the C++ below it.
#include <nanobind/stl/string.h>

#include "bind.h"

namespace nb = nanobind;

namespace {

PyObject* refusal_type = nullptr;

// Refusal(message, hint): the rooms turn it into their own named error.
void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const moet::Refusal& refusal) {
    const nb::tuple arguments = nb::make_tuple(refusal.what(), refusal.hint());
    PyErr_SetObject(refusal_type, arguments.ptr());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "moet's compiled core";
  refusal_type = PyErr_NewException("moet._core.Refusal", PyExc_Exception, nullptr);
  m.attr("Refusal") = nb::borrow(refusal_type);
  nb::register_exception_translator(translate);
  moet::bind_machine(m);
  moet::bind_pool(m);
  moet::bind_layer(m);
  moet::bind_mailbox(m);
  moet::bind_kernels(m);
  moet::bind_io(m);
}
