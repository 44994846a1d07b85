// moet._core: the door between Python and the C++ below it.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_core, m) { m.doc() = "moet's compiled core"; }
