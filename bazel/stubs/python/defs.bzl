"""The rules of rules_python, which Bazel 4 has itself."""

py_binary = native.py_binary
py_library = native.py_library
py_test = native.py_test
