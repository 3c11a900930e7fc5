"""The documentation holds together: every relative link leads to a file that exists.

    python3 test_docs.py <source directory>
"""
import glob
import os
import re
import sys

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def main():
    root = os.path.abspath(sys.argv[1])
    pages = glob.glob(os.path.join(root, "*.md"))
    for folder in ["docs", "examples", "bench"]:
        pages += glob.glob(os.path.join(root, folder, "**", "*.md"), recursive=True)
    mistakes = []
    for page in sorted(pages):
        name = os.path.relpath(page, root)
        with open(page, encoding="utf-8") as file:
            lines = file.read().splitlines()
        for number, line in enumerate(lines, 1):
            for target in LINK.findall(line):
                if "://" in target:
                    continue
                if not os.path.exists(os.path.join(os.path.dirname(page), target)):
                    mistakes.append("%s:%d: there is no %s" % (name, number, target))
    print("%d pages, %d mistakes" % (len(pages), len(mistakes)))
    if mistakes:
        sys.exit("\n".join(mistakes))


if __name__ == "__main__":
    main()
