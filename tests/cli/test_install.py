"""An installed libmla, seen by those who link to it: pkg-config, CMake, C++, the export list.

    python3 test_install.py --build DIR --source DIR --cmake CMAKE --cc CC [--cxx CXX]
"""
import argparse
import glob
import os
import shutil
import subprocess
import sys
import tempfile

CONSUMER = """cmake_minimum_required(VERSION 3.20)
project(engine LANGUAGES C)
find_package(libmla %s REQUIRED)
add_executable(engine %s)
target_link_libraries(engine PRIVATE libmla::mla)
"""


def run(*command, environment=None):
    env = dict(os.environ, **(environment or {}))
    result = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit("%s\n%s%s" % (" ".join(map(str, command)), result.stdout, result.stderr))
    return result.stdout


def check(condition, text):
    if not condition:
        sys.exit(text)


def main():
    parser = argparse.ArgumentParser()
    for name in ["--build", "--source", "--cmake", "--cc"]:
        parser.add_argument(name, required=True)
    parser.add_argument("--cxx", default="")
    args = parser.parse_args()
    example = os.path.join(args.source, "examples", "decode.c")
    with tempfile.TemporaryDirectory() as folder:
        prefix = os.path.join(folder, "prefix")
        run(args.cmake, "--install", args.build, "--prefix", prefix)
        version = run(os.path.join(prefix, "bin", "mla"), "--version").split()[1]

        descriptions = glob.glob(os.path.join(prefix, "lib*", "**", "libmla.pc"), recursive=True)
        check(len(descriptions) == 1, "one libmla.pc, not %s" % descriptions)
        library_folder = os.path.dirname(os.path.dirname(descriptions[0]))
        at = {"PKG_CONFIG_PATH": os.path.dirname(descriptions[0]),
              "LD_LIBRARY_PATH": library_folder}

        if shutil.which("pkg-config"):
            check(run("pkg-config", "--modversion", "libmla", environment=at).strip() == version,
                  "libmla.pc tells another version")
            flags = run("pkg-config", "--cflags", "--libs", "libmla", environment=at).split()
            program = os.path.join(folder, "engine")
            run(args.cc, "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", example, *flags,
                "-o", program, environment=at)
            check(run(program, environment=at).startswith("ok, "), "the example failed")

        if args.cxx:
            source = os.path.join(folder, "engine.cpp")
            with open(source, "w") as file:
                file.write("#include <mla/mla.h>\nint main() { return mla_version_number() == 0; }\n")
            program = os.path.join(folder, "engine_cpp")
            run(args.cxx, "-std=c++20", "-Wall", "-Wextra", "-Werror", source,
                "-I" + os.path.join(prefix, "include"), "-L" + library_folder, "-lmla", "-o", program)
            run(program, environment=at)

        consumer = os.path.join(folder, "consumer")
        os.mkdir(consumer)
        with open(os.path.join(consumer, "CMakeLists.txt"), "w") as file:
            file.write(CONSUMER % (version, example))
        build = os.path.join(folder, "consumer-build")
        run(args.cmake, "-S", consumer, "-B", build, "-DCMAKE_PREFIX_PATH=" + prefix,
            "-DCMAKE_C_COMPILER=" + args.cc)
        run(args.cmake, "--build", build)
        check(run(os.path.join(build, "engine")).startswith("ok, "), "the CMake consumer failed")

        shared = glob.glob(os.path.join(library_folder, "libmla.so"))
        if shared and shutil.which("nm"):
            names = [line.split()[-1] for line in
                     run("nm", "-D", "--defined-only", shared[0]).splitlines()]
            names = {name.split("@")[0] for name in names}
            strangers = {name for name in names
                         if not name.startswith("mla_") and name != "MLA_0"}
            check(not strangers, "exported beside mla_*: %s" % sorted(strangers))
            check("mla_decode_with_kvcache" in names, "mla_decode_with_kvcache is not exported")
    print("installed libmla %s: ok" % version)


if __name__ == "__main__":
    main()
