"""Writes into parts of a tensor (``y[:, 1:] += x``) as operators that return a new tensor.

`inplace.py` has the writes into whole tensors, and says why they are replaced. Here a tensor and
the slices in its memory are one family. A write into one of them becomes a result of its own,
which is put into a new version of the whole tensor (slice_scatter, select_scatter); who reads the
tensor or a slice afterwards reads it of that version. A family with anything else in it than new
memory, views of one result and plain writes is left as it is.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx.node import Node, map_arg

from rm_abstract.capture.inplace import is_new, plain_form, storage_of, storages_of, writes

_aten = torch.ops.aten
_SCATTER: dict[Any, Any] = {
    _aten.slice.Tensor: _aten.slice_scatter.default,
    _aten.select.int: _aten.select_scatter.default,
}
_SAME = frozenset({_aten.alias.default, _aten.detach.default})  # views of a whole tensor
_FILL: dict[Any, Any] = {
    _aten.fill_.Scalar: _aten.fill.Scalar,
    _aten.fill_.Tensor: _aten.fill.Tensor,
    _aten.zero_.default: _aten.zeros_like.default,
}


def replace(program: ExportedProgram) -> None:
    """Replaces what can be, in place."""
    graph = program.graph_module.graph
    written = {_written(node) for node in graph.nodes if writes(node)} - {None}
    if not written:
        return
    members: dict[int, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        for storage in storages_of(node):
            if storage in written:
                members[storage].append(node)
    families = [_Family(nodes) for nodes in members.values() if _simple(nodes)]
    for family in families:
        family.rewrite(graph)
    if families:
        graph.lint()
        program.graph_module.recompile()


def _written(node: Node) -> int | None:
    """The storage that an operator writes into; None where that is not one tensor's."""
    target = node.args[0] if node.args else None
    if not isinstance(target, Node) or not isinstance(target.meta.get("val"), torch.Tensor):
        return None
    return storage_of(target)


def _simple(nodes: list[Node]) -> bool:
    """Whether all that lies in one memory, in the order of the graph, can be rewritten."""
    root, *others = nodes
    if not is_new(root) or len(storages_of(root)) != 1:
        return False
    known = {root}
    for node in others:
        source = node.args[0] if node.args else None
        if source not in known or not isinstance(node.meta.get("val"), torch.Tensor):
            return False
        if writes(node):
            if _result_of(node) is None or not _reaches(source, root):
                return False
        elif not _is_view(node):
            return False
        known.add(node)
    writing = [i for i, node in enumerate(nodes) if writes(node)]
    if not writing:  # who writes names the memory that a dropout gave, which is the same
        return False
    last = writing[-1]
    return not _hidden(nodes, nodes[last])


def _is_view(node: Node) -> bool:
    """One tensor in, one out."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and len(target._schema.returns) == 1


def _reaches(source: Any, root: Node) -> bool:
    """Whether a new value of a view can be put into the whole tensor."""
    while source is not root:
        if writes(source):
            source = source.args[0]
            continue
        if source.target not in _SCATTER and source.target not in _SAME:
            return False
        if source.target is _aten.slice.Tensor and _step(source) != 1:
            return False
        source = source.args[0]
    return True


def _step(node: Node) -> Any:
    return node.args[4] if len(node.args) > 4 else node.kwargs.get("step", 1)


def _hidden(nodes: list[Node], last: Node) -> bool:
    """Whether the family may have a member that its memory does not show: the result of a
    composition, which may be its argument itself, made before the last write."""
    family = set(nodes)
    for node in nodes:
        for user in node.users:
            if user in family or user.op == "output" or last < user:
                continue
            if not is_new(user):
                return True
    return False


def _result_of(node: Node) -> Any:
    """The operator that gives what a node writes; None when there is none."""
    if node.kwargs.get("out") is not None:
        return None
    if node.target is _aten.copy_.default:
        return _aten.copy.default
    return _FILL.get(node.target) or plain_form(node)


class _Family:
    """A tensor in memory of its own and what else lies there."""

    def __init__(self, nodes: list[Node]) -> None:
        self._root, self._members = nodes[0], set(nodes)
        self._source: dict[Node, Any] = {node: node.args[0] for node in nodes[1:]}  # a member
        self._newest = nodes[0]  # version of the whole tensor
        self._fresh: dict[Node, Node] = {}  # by member: the node with its newest values

    def rewrite(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._fresh = {self._root: self._root}
        began = False
        for node in list(graph.nodes):
            began = began or node is self._root
            if not began:
                continue
            if node in self._members and writes(node):
                self._write(node)
            elif node is not self._root:
                self._read(node)
                if node in self._members:
                    self._fresh[node] = node
        for node in [n for n in reversed(graph.nodes) if n in self._members and writes(n)]:
            graph.erase_node(node)

    def _read(self, node: Node) -> None:
        """Lets a node read the newest values."""
        with self._graph.inserting_before(node):
            for source in node.all_input_nodes:
                if source in self._members:
                    node.replace_input_with(source, self._newest_of(source))

    def _write(self, node: Node) -> None:
        view = self._view(node)
        with self._graph.inserting_before(node):
            rest = [
                map_arg(a, lambda n: self._newest_of(n) if n in self._members else n)
                for a in node.args[1:]
            ]
            if node.target is _aten.copy_.default and self._is_itself(node):
                return
            operator = _result_of(node)
            value = self._call(node, operator, self._newest_of(view), *rest, **node.kwargs)
            while view is not self._root:
                whole = self._view(self._source[view])
                if view.target not in _SAME:
                    put, newest = _SCATTER[view.target], self._newest_of(whole)
                    value = self._call(node, put, newest, value, *view.args[1:], **view.kwargs)
                view = whole
            self._newest = value
            self._fresh = {self._root: value}

    def _is_itself(self, node: Node) -> bool:
        """A part is copied onto itself: how Python ends ``y[i] += x``."""
        of = node.args[1]
        return of in self._members and self._place(node) == self._place(of)

    def _place(self, member: Any) -> list[Any]:
        """Where in the whole tensor a member lies."""
        view, steps = self._view(member), []
        while view is not self._root:
            if view.target not in _SAME:
                steps.append((view.target, view.args[1:], tuple(view.kwargs.items())))
            view = self._view(self._source[view])
        return steps

    def _view(self, member: Any) -> Node:
        """The member itself, or where its operator writes the tensor that it writes."""
        view: Node = member
        while view is not self._root and writes(view):
            view = self._source[view]
        return view

    def _newest_of(self, member: Node) -> Node:
        member = self._view(member)
        known = self._fresh.get(member)
        if known is None:
            source = self._newest_of(self._source[member])
            rest, named = member.args[1:], member.kwargs
            known = self._call(member, member.target, source, *rest, **named)
            self._fresh[member] = known
        return known

    def _call(self, like: Node, operator: Any, *args: Any, **kwargs: Any) -> Node:
        """A call in the place of `like`, which says where in the user's program it comes from."""
        node = self._graph.call_function(operator, args, kwargs)
        value = self._root.meta["val"]
        given, named = map_arg((args, kwargs), lambda n: n.meta["val"])
        with value.fake_mode.shape_env.suppress_guards(), value.fake_mode:
            node.meta = {**like.meta, "val": operator(*given, **named)}
        return node
