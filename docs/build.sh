#!/usr/bin/env bash
# Builds the documentation site into build/site:  bash docs/build.sh [--serve | --site-dir FOLDER]
# In an environment of its own, build/docs-env (once; a minute). The API's pages are Markdown that
# docs/docstrings.py has made, so that neither torch nor Megatron is needed here. Any warning, a dead
# link among them, fails the build.
#   PYTHON=python3.12    the interpreter to make it with
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."

env=build/docs-env
wanted=$(sed -n '/^docs = \[/,/^\]/p' pyproject.toml)
if [ "$(cat "$env/.stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "docs/build.sh: making $env (once)" >&2
    "${PYTHON:-python3}" -m venv --clear "$env"
    # The requirements of the extra alone; the package itself would bring torch.
    mapfile -t requirements < <(sed -n 's/^ *"\([^"]*\)",.*/\1/p' <<<"$wanted")
    "$env/bin/python" -m pip --disable-pip-version-check -q install "${requirements[@]}"
    echo "$wanted" >"$env/.stamp"
fi
export NO_MKDOCS_2_WARNING=1  # an announcement of Material's, not a warning about the pages
if [ "${1:-}" = --serve ]; then
    exec "$env/bin/python" -m mkdocs serve --strict --config-file .mkdocs.yml
fi
exec "$env/bin/python" -m mkdocs build --strict --quiet --config-file .mkdocs.yml "$@"
