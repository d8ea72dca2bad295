// Memory for a sum, as a buffer of Python's: a numpy array of that size is given back
// to the system after each call, see base/block.h.
#include <new>

#include "base/block.h"
#include "stream/stream_module.h"

namespace duck::stream {
namespace {

using namespace duck::binding;

struct SumMemory {
  PyObject_HEAD Block block;
  size_t num_bytes;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  auto* memory = reinterpret_cast<SumMemory*>(self);
  return PyBuffer_FillInfo(view, self, memory->block.data(),
                           Py_ssize_t(memory->num_bytes), /*readonly=*/0, flags);
}

void deallocate(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<SumMemory*>(self)->block.~Block();
  PyObject_Free(self);
  Py_DECREF(type);
}

PyObject* make_type() {
  PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(deallocate)},
                         {0, nullptr}};
  PyType_Spec spec = {"vllm_duck.executor._stream.SumMemory", sizeof(SumMemory), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return PyType_FromSpec(&spec);
}

// -> a writable buffer of that size
PyObject* sum_memory(Arguments& args) {
  size_t num_bytes = args.u64("num_bytes");
  if (!args.done()) return nullptr;
  static PyObject* type = make_type();
  if (!type) return nullptr;
  Block block(num_bytes);
  PyObject* self = PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0);
  if (!self) return nullptr;
  auto* memory = reinterpret_cast<SumMemory*>(self);
  new (&memory->block) Block(std::move(block));
  memory->num_bytes = num_bytes;
  return self;
}

}  // namespace

std::vector<PyMethodDef> memory_functions() {
  return {method<sum_memory>("sum_memory")};
}

}  // namespace duck::stream
