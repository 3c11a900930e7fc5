# Two commands on a fresh machine:
#   make run    installs what is missing, builds, and generates text from the tiny model
#   make test   the same, then every test
# Others: build, soak (long tests), bench, format, format-check, install, clean.
BUILD ?= build
CMAKE_FLAGS ?=
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
SOURCES = $(shell git ls-files --cached --others --exclude-standard '*.c' '*.h' '*.cu' '*.cuh')

.PHONY: run test build soak bench format format-check install clean dependencies
.DEFAULT_GOAL := build

dependencies:
	@sh tools/install_dependencies.sh

build: dependencies
	@cmake -S . -B $(BUILD) -DMLA_WERROR=$(if $(CI),ON,OFF) $(CMAKE_FLAGS) >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@cmake --build $(BUILD) -j $(JOBS)

run: build
	@sh tools/run_demo.sh $(BUILD)/bin/mla models/tiny/target

test: build
	@sh tools/run_tests.sh $(BUILD) $(JOBS)

soak: build
	@sh tools/run_tests.sh $(BUILD) $(JOBS) soak

bench: build
	$(BUILD)/bin/mla bench all

format:
	clang-format -i $(SOURCES)

format-check:
	clang-format --dry-run --Werror $(SOURCES)

install: build
	cmake --install $(BUILD)

clean:
	rm -rf $(BUILD) $(BUILD).log
