"""The targets of rlx, of one list of rooms: a room's library sees those of the rooms before it."""

load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

# From the ground up, as AGENTS.md has them; tests/bazel_test.py compares.
ROOMS = [
    "base",
    "system",
    "option",
    "journal",
    "algorithms",
    "cli",
    "model",
    "train",
    "observe",
    "fleet",
    "engines",
    "sandbox",
    "workers",
    "environments",
    "rewards",
    "rollout",
    "agents",
    "launch",
    "mismatch",
    "evaluation",
    "doctor",
    "plan",
    "debugger",
    "config",
    "areal",
    "run",
    "tinker",
]
FILES = ["base", "config", "option"]  # rooms of one file of the package //rlx
COMMANDS = [
    "main",
    "serve",
    "convert",
    "push",
    "replay",
    "report",
    "compare",
    "evaluate",
    "debug_workflow",
    "gateway",
    "cluster",
    "k8s",
    "keys",
    "configs",
    "sweep",
    "runs",
    "status",
]

def _package(room):
    return "//rlx" if room in FILES else "//rlx/" + room

def _label(room):
    return _package(room) + ":" + room

def room(name, srcs = None):
    """The library of a room, for those after it; what they import of those before it is there."""
    place = ROOMS.index(name)
    py_library(
        name = name,
        srcs = srcs or native.glob(["**/*.py"]),
        data = [] if srcs else native.glob(["**"], exclude = ["**/*.py", "**/*.pyc"]),
        deps = [_label(before) for before in ROOMS[:place]],
        visibility = [_package(after) + ":__pkg__" for after in ROOMS[place + 1:]] + [
            "//rlx:__pkg__",  # commands
            "//rlx_torch:__pkg__",
        ],
    )

def commands():
    """A program for each command, and `rlx`, which has them all."""
    py_library(
        name = "commands",
        srcs = native.glob(["*.py"]),
        data = ["//:configs"] + native.glob(["assets/**"]),
        deps = [_label(each) for each in ROOMS] + ["//rlx_torch"],
        visibility = ["//visibility:public"],
    )
    for name, main in [("rlx", "__main__.py")] + [(each, each + ".py") for each in COMMANDS]:
        _program(name, main)
    for each in ["doctor", "areal", "tinker"]:  # directories of rooms
        _program(each + "_command", "//rlx/" + each + ":__main__.py")

def _program(name, main):
    py_binary(name = name, srcs = [main], main = main, deps = [":commands"], legacy_create_init = 0)

def tests():
    """A test for each file of tests, under pytest, and a suite for each directory of them."""
    suites = {}
    for path in native.glob(["*_test.py", "*/*_test.py"]):
        name = path[:-len(".py")]
        suites.setdefault(name.rpartition("/")[0] or "whole", []).append(name)
        py_test(
            name = name,
            srcs = ["//bazel:pytest_main.py"],
            main = "//bazel:pytest_main.py",
            args = ["tests/" + path],
            data = ["//:repository"] + native.glob(["**"], exclude = ["**/*.pyc"]),
            deps = ["//rlx:commands"],
            legacy_create_init = 0,
            tags = ["local"],  # they start processes, and sandboxes of their own
            timeout = "eternal",
        )
    for name, members in suites.items():
        native.test_suite(name = name, tests = members)
