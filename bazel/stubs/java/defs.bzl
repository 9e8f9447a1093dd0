"""What Bazel 4 loads of rules_java for its own toolchain, from Bazel itself."""

java_import = native.java_import
java_runtime = native.java_runtime
java_toolchain = native.java_toolchain
