"""What a forward may read besides its arguments: attributes, containers and objects held in them,
classes, functions, globals and captured variables.

The search starts at the forwards of a module tree and follows every function and class that their
code names. It over-approximates: an attribute counts as read when its name occurs anywhere in the
code that forward reaches. What may be read and cannot be watched is listed in `unseen`; a forward
with such a source is not compiled. Nothing here runs user code.

One search serves three: the router's guard (has anything changed since the capture?), the check for
side effects (does forward change any of it?), and the identity of a cached capture.
"""

from __future__ import annotations

import abc
import builtins
import functools
import gc
import os
import sys
import types
import weakref
from collections import OrderedDict, deque
from typing import Any

import torch

from rm_abstract.base.kinds import kind_of
from rm_abstract.guards.code import Reads, reads_of
from rm_abstract.guards.found import (
    BOOKKEEPING,
    Place,
    Sources,
    functions_of,
    is_user_module,
    partials_of,
)
from rm_abstract.guards.kinds import (
    container_base,
    is_a,
    is_buffer,
    is_harmless,
    is_leaf,
    members_of,
    slots_of,
)
from rm_abstract.guards.packages import is_user_class, is_user_code, namespace_of
from rm_abstract.guards.registered import (
    by_type,
    interface_tables,
    is_table_of_code,
    put_there,
    value_behind,
)

_NOT_CALLED_BY_FORWARD = frozenset(
    {"__repr__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__"}
    | {"__deepcopy__", "__del__", "__dir__", "__init_subclass__"}
    | {"__sizeof__", "__setattr__", "__delattr__", "__str__", "__getnewargs__"}
)
# Methods that operators and statements call without naming them: any code may reach them.
_IMPLICIT = (
    frozenset(
        name
        for kind in (int, float, list, dict, set, type(iter(())))
        for name in vars(kind)
        if name.startswith("__") and callable(vars(kind)[name])
    )
    | {"__get__", "__set__", "__delete__", "__getattr__", "__getattribute__", "__enter__"}
    | {"__exit__", "__instancecheck__", "__subclasscheck__", "__missing__", "__matmul__"}
    | {"__rmatmul__", "__torch_function__", "__iadd__", "__imul__", "__isub__", "__itruediv__"}
    | {"__imatmul__", "__ipow__", "__length_hint__"}
) - (_NOT_CALLED_BY_FORWARD | {"__init__", "__new__", "__format__", "__dir__", "__class__"})
_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
_START = (
    frozenset({"forward", "training", "__call__", "__class__"})
    | {"_call_impl", "_wrapped_call_impl"}  # what __call__ of a module runs
    | _IMPLICIT
)
# Names by which code asks a weight about gradients, beside `grad` itself.
_WANTS_GRADIENTS = frozenset({"requires_grad", "is_leaf", "grad_fn"})
# What nothing compares: registries of modules, tensors and functions, and of arguments the class
# (a Parameter or a plain tensor), the version and the memory.
_UNWATCHED = frozenset(
    {"_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"}
    | {"_state_dict_hooks", "_state_dict_pre_hooks", "_post_accumulate_grad_hooks"}
    | {"_non_persistent_buffers_set", "_load_state_dict_pre_hooks", "__annotations__"}
    | {"Parameter", "_version", "is_shared", "is_pinned", "untyped_storage", "_typed_storage"}
)
_NAMESPACES = frozenset({"globals", "eval", "exec"})
_PARTIAL = ("func", "args", "keywords")
_MAX_HOLDERS = 4096
_MAX_ITEMS = 4096  # of lists, which are compared item by item at every call
_MAX_SET = 256
_MAX_ARRAY_BYTES = 16384  # compared at every call
_MAX_DICT = 65536


def of_module(module: torch.nn.Module) -> Sources:
    """The sources of a module tree's forwards."""
    return _Search(module).run()


class _Search:
    def __init__(self, root: torch.nn.Module) -> None:
        self.found = Sources()
        self._root = root
        self._names: set[str] = set(_START)
        self._every = False
        self._seen: set[int] = set()
        self._functions: set[int] = set()
        self._classes: dict[type, bool] = {}  # with constructors or not
        self._methods: list[tuple[str, types.FunctionType]] = []
        self._spaces: list[tuple[dict[str, Any], Place, bool]] = []  # entries among the names
        self._visited: set[tuple[int, Any]] = set()
        self._named: dict[int, tuple[dict[str, Any], dict[str, None], Place]] = {}
        self._pending: list[tuple[Any, Place, bool]] = []
        self._items = 0
        self._read: set[int] = set()  # functions whose code was looked at
        self._followed: set[str] = set()  # files of libraries whose functions are looked at
        self._packages: set[str] = set()  # of the tree's classes, without torch
        self._passed: set[int] = set()  # their other functions
        self._users: set[str] = set()  # names in code of the user's
        self._tensors: list[tuple[torch.Tensor, Place]] = []  # weights and others

    def run(self) -> Sources:
        root = self._root
        parts = list(root.named_modules())
        for path, part in parts:
            self._seen.add(id(part))
            for group in (part._parameters, part._buffers, vars(part)):
                for name, held in group.items():
                    if isinstance(held, torch.Tensor) and id(held) not in self._seen:
                        self._seen.add(id(held))
                        self._tensor(held, f"{path}.{name}" if path else name)
        for path, part in parts:
            self._spaces.append((vars(part), path, True))
            self._tree_class(type(part))
        self._library_functions()
        self._close()
        found = self.found
        if self._every:
            self._names.update(n for kind in self._classes for b in kind.__mro__ for n in vars(b))
        found.names, found.every = frozenset(self._names), self._every
        found.dicts += [(space, tuple(names), at) for space, names, at in self._named.values()]
        found.classes = list(self._classes)
        self._attributes_of_tensors()
        found.asked = (
            "training" in self._users,
            not self._users.isdisjoint(_WANTS_GRADIENTS),
            "grad" in self._users,
        )
        return found

    def _close(self) -> None:
        """Follows reads until no new name, function, class or value turns up."""
        size: tuple[int, ...] = ()
        while size != (size := self._size()):
            while self._pending:
                self._visit(*self._pending.pop())
            for name, function in self._methods:
                if self._every or name in self._names:
                    self._function(function)
            for space, place, strict in self._spaces:
                for name in list(space):
                    self._entry(space, name, place, strict)
            while self._pending:
                self._visit(*self._pending.pop())

    def _size(self) -> tuple[int, ...]:
        found = (self._names, self._methods, self._spaces, self._followed, self._read)
        return tuple(map(len, found))

    def _entry(self, space: dict[str, Any], name: Any, place: Place, strict: bool) -> None:
        if name in BOOKKEEPING or not (self._every or name in self._names):
            return
        value = space[name]
        key = (id(space), name)
        if key not in self._visited:
            self._visited.add(key)
            self._pending.append((value, f"{place}.{name}" if place else str(name), strict))

    def _unseen(self, what: str, where: Place) -> None:
        line = f"{where} is {what}"
        if line not in self.found.unseen:
            self.found.unseen.append(line)

    # ---- values -----------------------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor, where: Place) -> None:
        """What a script may have put on a tensor: `weight.scale`."""
        self._tensors.append((tensor, where))
        if inside := vars(tensor):
            self._spaces.append((inside, where, True))

    def _attributes_of_tensors(self) -> None:
        """Watches them, and where code of the user's may read one that is not there yet."""
        for tensor, where in self._tensors:
            inside = vars(tensor)
            if self.found.user_code or any(self.found.may_read(name) for name in inside):
                self.found.dicts.append((inside, True, where))

    def _visit(self, value: Any, where: Place, strict: bool) -> None:
        """Adds what a value holds. Not `strict`: a library's own, which its version stands for."""
        if is_a(value, str) and len(value) < 64:
            self._names.add(value)  # it may name an attribute
        if is_a(value, type):
            if is_user_class(value):
                self._class(value, constructed=True)
            elif strict and issubclass(value, torch.nn.Module):
                self._classes.setdefault(value, False)  # its forward may be replaced
            if is_a(value, abc.ABCMeta) and (strict or is_user_class(value)):
                self._abstract(value)
            return
        if is_a(value, (staticmethod, classmethod)):
            value = value.__func__
        if is_a(value, types.FunctionType):
            self._function(value)
            if value is os.getenv:
                self._pending.append((os.environ, "os.environ", strict))
            return
        if is_leaf(value) or id(value) in self._seen or value is self._root:
            return
        if is_a(value, weakref.ref) and id(value()) in self._seen:
            return  # to a part or a weight of the tree, which lives as long as the tree
        if is_a(value, types.MethodType):
            self._pending += [(value.__func__, where, strict), (value.__self__, where, strict)]
        elif is_a(value, functools.partial):
            self._partial(value, where, strict)
        elif is_a(value, functools.partialmethod):
            self._seen.add(id(value))
            self.found.dicts.append((vars(value), None, where))
            self._pending += [(held, where, strict) for held in vars(value).values()]
        elif is_a(value, torch.Tensor):
            self._seen.add(id(value))
            self.found.tensors.append((value, where))
            self._tensor(value, where)
        elif is_a(value, torch.nn.Module):
            self._foreign_module(value, where)
        elif is_a(value, types.ModuleType):
            self._module_value(value, where, strict)
        elif strict or is_user_class(type(value)):
            self._holder(value, where)
        elif interface_tables(value) or is_a(value, dict):
            self._registry(value, where)
        elif kind_of(value) == "tuple":
            self._pending += [(v, where, False) for v in value]

    def _holder(self, value: Any, where: Place) -> None:
        self._seen.add(id(value))
        found = self.found
        kind: Any = type(value)
        if len(found.dicts) + len(found.held) + len(found.objects) >= _MAX_HOLDERS:
            self._unseen(f"beyond {_MAX_HOLDERS} containers and objects", where)
            return
        if kind_of(value) == "tuple":
            if is_user_class(kind):  # a named tuple's
                self._class(kind, constructed=False)
            self._pending += [(v, f"{where}[{i}]", True) for i, v in enumerate(value)]
        elif is_a(value, types.CellType):
            self._cell(value, where, True)
        elif kind.__module__ == "numpy" and kind.__name__ == "ndarray":
            self._array(value, where)
        elif is_buffer(kind):
            if memoryview(value).nbytes > _MAX_ARRAY_BYTES:
                self._unseen(f"a {kind.__qualname__} of {memoryview(value).nbytes} bytes", where)
            found.arrays.append((value, where))
        elif kind is types.MappingProxyType:
            self._proxy(value, where)
        elif kind in (OrderedDict, deque) or container_base(kind) is kind:
            self._container(value, where)
        elif is_harmless(kind):
            return
        else:
            self._object(value, where)

    def _container(self, value: Any, where: Place) -> None:
        if isinstance(value, dict):
            if len(value) > _MAX_DICT:
                self._unseen(f"a dictionary of {len(value)} entries", where)
                return
            self.found.dicts.append((value, None, where))
            if isinstance(value, OrderedDict):
                self._items += len(value)
                self.found.held.append((value, where))  # its order
            for k, v in list(dict.items(value)):
                self._pending += [(v, f"{where}[{k!r}]", True)]
                if not is_leaf(k):
                    self._pending += [(k, f"a key of {where}", True)]
            return
        self.found.held.append((value, where))
        if isinstance(value, (set, frozenset)):
            odd = [v for v in value if not is_leaf(v)]
            if odd or len(value) > _MAX_SET:
                self._unseen(f"a set of {len(value)} objects", where)
            self._names.update(v for v in value if isinstance(v, str))
            return
        self._items += len(value)
        if self._items > _MAX_ITEMS:
            self._unseen(f"a {type(value).__name__} of {len(value)} items", where)
            self.found.held.pop()
            return
        self._pending += [(v, f"{where}[{i}]", True) for i, v in enumerate(value)]

    def _array(self, value: Any, where: Place) -> None:
        if value.dtype.hasobject or not value.flags.c_contiguous or value.nbytes > _MAX_ARRAY_BYTES:
            self._unseen(f"a NumPy array of {value.dtype} {list(value.shape)}", where)
        self.found.arrays.append((value, where))

    def _object(self, value: Any, where: Place) -> None:
        """An instance: its dictionary, its slots, its class; or nothing that can be seen."""
        kind: Any = type(value)
        base = container_base(kind)
        slots = slots_of(kind) if base is None else members_of(kind)
        if slots is None or (base is not None and base not in (dict, list)):
            self._unseen(f"a {kind.__module__}.{kind.__qualname__}", where)
            return
        if base is not None:
            self._container(value, where)
        self._class(kind, constructed=False)
        self.found.objects.append((value, slots, where))
        self._names.update(slots if base is not None else ())
        for name in slots:
            try:
                held = object.__getattribute__(value, name)
            except AttributeError:  # never filled
                continue
            self._pending.append((held, f"{where}.{name}", True))
        try:
            inside = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return
        if type(inside) is not dict:
            self._unseen(f"a {kind.__qualname__} without an ordinary __dict__", where)
            return
        # Libraries read attributes by computed names (a configuration's output_attentions, which a
        # property keeps under another name): of their objects every attribute is compared.
        self.found.dicts.append((inside, True if is_user_class(kind) else None, where))
        self._spaces.append((inside, where, True))

    def _proxy(self, value: Any, where: Place) -> None:
        """A read-only view of a dictionary: the dictionary may change behind it."""
        behind = [held for held in gc.get_referents(value) if type(held) is dict]
        if len(behind) != 1:
            self._unseen("a mappingproxy of no ordinary dictionary", where)
            return
        self._pending.append((behind[0], where, True))

    def _partial(self, value: functools.partial[Any], where: Place, strict: bool) -> None:
        self._seen.add(id(value))
        found, kind = self.found, type(value)
        if is_user_class(kind):
            self._class(kind, constructed=False)
        found.objects.append((value, members_of(kind), where))  # __setstate__ writes them all
        found.dicts += [(value.keywords, None, where), (value.__dict__, True, where)]
        self._spaces.append((value.__dict__, where, strict))
        self._names.update(_PARTIAL, value.keywords)
        self._pending += [(value.func, where, strict), (value.args, where, strict)]
        self._pending += [(v, f"{where}.{k}", strict) for k, v in value.keywords.items()]

    def _registry(self, value: Any, where: Place) -> None:
        """A table in which a library looks functions up: those that a script put there."""
        self._seen.add(id(value))
        watched = interface_tables(value)
        watched += [value] if is_table_of_code(value) and not by_type(value) else []
        self.found.dicts += [(table, None, where) for table in watched]
        for item in (item for table in watched for item in dict.values(table)):
            if is_a(item, types.FunctionType):  # any of them may be given the module
                self._function(item)
        self._pending += [(item, f"{where}[{key!r}]", True) for key, item in put_there(value)]
        if functions := by_type(value):
            self.found.dicts.append((value, None, where))
            self._pending += [(item, where, True) for item in functions]
            self._pending += [(kind, where, True) for kind in dict.keys(value)]

    def _foreign_module(self, module: torch.nn.Module, where: Place) -> None:
        """A module that is no part of the tree: its weights are constants of the capture."""
        for path, part in module.named_modules():
            if id(part) in self._seen:
                continue
            self._seen.add(id(part))
            place = f"{where}.{path}" if path else where
            for group in (part._parameters, part._buffers, part._modules):
                self.found.dicts.append((group, None, place))
            for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
                if tensor is not None:
                    self._pending.append((tensor, f"{place}.{name}", True))
            self.found.dicts.append((vars(part), True, place))
            self.found.objects.append((part, (), place))
            self._spaces.append((vars(part), place, True))
            self._tree_class(type(part))

    def _module_value(self, module: types.ModuleType, where: Place, strict: bool) -> None:
        """A Python module that code passes on: any name of it may be read."""
        self._seen.add(id(module))
        if not strict:
            return
        if type(module) is not types.ModuleType and not self._lazy(module):
            self._unseen(f"a module of type {type(module).__qualname__}", where)
            return
        self.found.dicts.append((vars(module), True, where))
        self._spaces.append((vars(module), where, is_user_module(module)))

    @staticmethod
    def _lazy(module: types.ModuleType) -> bool:
        """A module of an installed package with look-ups of its own."""
        return not is_user_module(module)

    # ---- classes ----------------------------------------------------------------------------

    def _tree_class(self, kind: type) -> None:
        if kind not in self._classes:
            self._class(kind, constructed=False)

    def _class(self, kind: type, constructed: bool) -> None:
        """Its methods as far as reached code names them, and the class attributes it names."""
        if self._classes.get(kind, False) >= constructed and kind in self._classes:
            return
        self._classes[kind] = constructed
        self._names.update(_CONSTRUCTORS if constructed else ())
        if kind.__dict__.get("_is_protocol"):  # isinstance() asks for the attributes that it names
            self._names.update(name for name in vars(kind) if not name.startswith("_"))
        self._followed.add(namespace_of(kind).get("__file__") or "")
        user = is_user_class(kind)
        self._packages.update({kind.__module__.partition(".")[0]} - {"torch", "builtins"})
        self.found.user_code |= user
        if is_user_class(type(kind)):  # a metaclass: its attributes are read through the class
            self._class(type(kind), constructed=False)
        for base in kind.__mro__:
            if base in (object, torch.nn.Module) or not base.__flags__ & (1 << 9):
                continue
            # A property of a base class in another file reads as much as one of this file.
            self._followed.add(namespace_of(base).get("__file__") or "")
            inside = dict(vars(base))
            values = {n: v for n, v in inside.items() if not any(True for _ in functions_of(v))}
            values |= {n: held for n, v in inside.items() if (held := tuple(partials_of(v)))}
            self._spaces.append((values, base.__qualname__, is_user_class(base)))
            for name, value in inside.items():
                implicit = name.startswith("__") and name not in _NOT_CALLED_BY_FORWARD
                if name in _CONSTRUCTORS:
                    implicit = constructed
                for function in functions_of(value):
                    if implicit:
                        self._function(function)
                    elif not name.startswith("__"):
                        self._methods.append((name, function))

    def _abstract(self, kind: type) -> None:
        """A class that others are registered with, which isinstance() asks for."""
        if kind not in self.found.abstract:
            self.found.abstract.append(kind)

    # ---- functions --------------------------------------------------------------------------

    def _function(self, function: types.FunctionType) -> None:
        """What a function reads: globals, captured variables, defaults."""
        user = is_user_code(function)
        if id(function) not in self._functions:
            self._functions.add(id(function))
            names = function.__code__.co_freevars
            for name, cell in zip(names, function.__closure__ or (), strict=False):
                if name != "__class__":
                    self._cell(cell, name, user)
            if not user and "__wrapped__" in function.__dict__:
                self._pending.append(
                    (function.__dict__["__wrapped__"], function.__qualname__, False)
                )
        followed = user or (function.__globals__.get("__file__") or "") in self._followed
        if not followed:
            self._library_function(function)
            return
        if id(function) in self._read:
            return
        self._read.add(id(function))
        reads = reads_of(function.__code__)
        self._names.update(reads.names)
        for chain in reads.chains:
            self._global(function.__globals__, chain, user)
        if not user:
            return
        found = self.found
        for name in reads.passed_on:
            self._unseen(f"{name}, passed on to other code", function.__qualname__)
        for name in sorted(_UNWATCHED & reads.names):
            self._unseen(f"a reader of {name}", function.__qualname__)
        self._users.update(reads.names)
        if not _NAMESPACES.isdisjoint(reads.names):  # it may read any of its globals
            space = function.__globals__
            if id(space) not in self._seen:
                self._seen.add(id(space))
                found.dicts.append((space, True, function.__module__))
                self._spaces.append((space, function.__module__, True))
        found.user_code, self._every = True, self._every or reads.dynamic
        found.functions.append(function)
        found.user_functions.append(function)
        if function.__dict__:
            self._pending.append((function.__dict__, function.__qualname__, True))
        defaults = [*(function.__defaults__ or ())]
        if function.__kwdefaults__:
            self._pending.append((function.__kwdefaults__, function.__qualname__, True))
        self._pending += [(v, f"a default of {function.__qualname__}", True) for v in defaults]
        self._imports(function, reads)

    def _library_function(self, function: types.FunctionType) -> None:
        """One of the packages that the tree's classes are from, in another file: it may read
        attributes of a module it is given, and lead to code of the user's."""
        space = function.__globals__
        package = str(space.get("__name__", "")).partition(".")[0]
        if package not in self._packages or id(function) in self._passed:
            return
        self._passed.add(id(function))
        reads = reads_of(function.__code__)
        self._names.update(reads.names)
        for chain in reads.chains:
            value = value_behind(space, chain)
            if is_a(value, types.FunctionType):
                self._function(value)
            elif value is not None and id(value) not in self._seen:
                if interface_tables(value) or is_table_of_code(value):
                    self._registry(value, ".".join(chain))

    def _cell(self, cell: types.CellType, name: str, strict: bool) -> None:
        if id(cell) in self._seen and strict:
            return
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            return
        if strict:
            self._seen.add(id(cell))
            self.found.held.append((cell, name))
        self._pending.append((held, name, strict))

    def _imports(self, function: types.FunctionType, reads: Reads) -> None:
        for name in reads.imports:
            self._name_in(sys.modules, name, "sys.modules")
            for full in (name, f"{function.__globals__.get('__package__') or ''}.{name}"):
                module = sys.modules.get(full)
                if module is not None:
                    self._pending.append((module, full, True))

    def _global(self, space: dict[str, Any], chain: tuple[str, ...], user: bool) -> None:
        """A global variable and the attributes that code reads of modules behind it."""
        where = str(space.get("__name__", ""))
        name = chain[0]
        self._name_in(space, name, where)
        if name not in space:
            inside = vars(builtins)
            self._name_in(inside, name, "builtins")
            if name in inside:
                self._pending.append((inside[name], name, False))
            return
        value, path = space[name], name
        for attribute in chain[1:]:
            if not is_a(value, types.ModuleType):
                break
            inside = vars(value)
            path = f"{path}.{attribute}"
            self._name_in(inside, attribute, value.__name__)
            if attribute not in inside:
                lazy = type(value) is not types.ModuleType or "__getattr__" in inside
                if user and lazy:
                    self._unseen("computed by its module", path)
                return
            value = inside[attribute]
        if is_a(value, types.ModuleType) and not user:
            return
        self._pending.append((value, path, user))

    def _name_in(self, space: dict[str, Any], name: str, where: Place) -> None:
        self._named.setdefault(id(space), (space, {}, where))[1][name] = None

    def _library_functions(self) -> None:
        """torch's own functions: a replaced one is noticed, whoever calls it."""
        for module in (torch, torch.nn.functional):
            inside = vars(module)
            for name, value in inside.items():
                if name == "manual_seed":
                    continue  # importing dynamo wraps it; a forward that calls it has an effect
                if is_a(value, (types.FunctionType, types.BuiltinFunctionType)):
                    self._name_in(inside, name, module.__name__)
                    if is_a(value, types.FunctionType) and is_user_code(value):
                        self._function(value)
        self._classes.setdefault(torch.Tensor, False)
