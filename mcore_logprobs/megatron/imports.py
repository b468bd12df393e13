"""Act on a module when it is imported, and wrap functions in it; a call's arguments by name."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, act: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call `act(module)` once the module `name` has run: now if it has, else when it is imported.

    An import that happens inside a package's own `__init__` is seen before that package's names
    are bound. Nothing is imported here.

    Returns: a function that takes a pending call back.

    Raises:
        ValueError: the module is running now, and what it is going to define is not known yet.
    """
    if name in sys.modules:
        if getattr(getattr(sys.modules[name], "__spec__", None), "_initializing", False):
            raise ValueError(
                f"{name}: expected a module whose import has ended or not begun, got one whose "
                "import has led here; do this before that import or after it"
            )
        act(sys.modules[name])
        return lambda: None
    for waiting in sys.meta_path:
        if isinstance(waiting, _Watcher) and (waiting.name, waiting.act) == (name, act):
            return waiting.stop
    finder = _Watcher(name, act)
    sys.meta_path.insert(0, finder)
    return finder.stop


class _Watcher(importlib.abc.MetaPathFinder):
    """Finds nothing itself: has the module's own loader tell when it has run the module.

    It stays until that and `act` have gone through: a search may be followed by no import, and an
    import that fails by another.
    """

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self.name, self.act, self._searching = name, act, False

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self.name or self._searching:
            return None
        self._searching = True  # or the search below would come back here
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            run(module)
            self.act(module)
            self.stop()

        spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


class PassedArguments:
    """A call's arguments by parameter name, handed on where its caller put them.

    What is by name stays by name: the function that is called may be somebody's wrapper, which
    looks for them there, or have its parameters in another order.

    Args:
        signature: whose parameters those by position are.
    """

    def __init__(
        self, signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in signature.parameters.values() if p.kind in by_position]
        self._args, self._kwargs = list(args), dict(kwargs)
        self._places = {name: place for place, name in enumerate(names[: len(args)])}

    def get(self, name: str, default: object = None) -> Any:
        """The argument, or `default` where it was not passed."""
        place = self._places.get(name)
        return self._kwargs.get(name, default) if place is None else self._args[place]

    def __setitem__(self, name: str, value: object) -> None:
        if name in self._places:
            self._args[self._places[name]] = value
        else:
            self._kwargs[name] = value

    def call(self, function: Callable[..., object]) -> object:
        return function(*self._args, **self._kwargs)


def replace_function(
    module: object,
    name: str,
    *,
    before: Callable[[PassedArguments], None] | None = None,
    after: Callable[..., None] | None = None,
) -> Callable[[], None]:
    """Wrap `module.name`: `before(arguments)` may change them, `after(result)` sees the result.

    Returns: a function that puts the original back.
    """
    original = getattr(module, name)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args: object, **kwargs: object) -> object:
        arguments = PassedArguments(signature, args, kwargs)
        if before is not None:
            before(arguments)
        result = arguments.call(original)
        if after is not None:
            after(result)
        return result

    setattr(module, name, wrapped)
    return lambda: setattr(module, name, original)
