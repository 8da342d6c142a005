"""Where a value that forward reads may live, how it is read from there and how it is edited.

Written from the public contract alone: a served model answers as PyTorch does, whatever the script
changes between two calls. Every piece is source text; `edit_cases` puts pieces together to scripts.
"""
# Tables of source text: one line each reads best.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Holder:
    """One place for a value: statements of the module, statements of `__init__`, an expression.

    `edits` are statements that change what `read` gives, with `m` the model; they run in the module.
    `methods` are members of the model's class, `state` an expression for what calls leave behind.
    """

    module: str = ""
    init: str = ""
    read: str = ""
    edits: dict[str, str] = field(default_factory=dict)
    methods: str = ""
    state: str = "None"
    control: bool = True  # without an edit it should be served by a program


def attribute(init: str, read: str, module: str = "", /, **edits: str) -> Holder:
    return Holder(module=module, init=init, read=read, edits=edits)


def shared(module: str, read: str, control: bool = True, /, **edits: str) -> Holder:
    return Holder(module=module, read=read, edits=edits, control=control)


BOX = "class Box:\n    def __init__(self, v): self.v = v\n"

HOLDERS: dict[str, Holder] = {
    "attribute": attribute(
        "self.h = 2.0", "self.h",
        assign="m.h = 3.0", by_setattr="setattr(m, 'h', 3.0)", by_dict="m.__dict__['h'] = 3.0",
        update="vars(m).update(h=3.0)", sign="m.h = -2.0", to_int="m.h = 3", to_bool="m.h = True",
        to_tensor="m.h = torch.tensor(3.0)", delete="del m.h", to_nan="m.h = float('nan')",
        around="object.__setattr__(m, 'h', 3.0)",
    ),
    "class_attribute": Holder(
        methods="    h = 2.0\n", read="self.h",
        edits={"on_class": "Model.h = 3.0", "on_instance": "m.h = 3.0", "on_base": "Base.h = 5.0",
               "type_setattr": "type.__setattr__(Model, 'h', 3.0)", "delete": "del Model.h"},
    ),
    "base_attribute": shared(
        "Base.h = 2.0\n", "self.h", on_base="Base.h = 3.0", on_class="Model.h = 3.0",
        on_instance="m.h = 3.0", on_torch_module="nn.Module.h = 3.0; del Base.h\ntry: m.h\nfinally: del nn.Module.h; Base.h = 3.0",
    ),
    "object": attribute(
        "self.h = Box(2.0)", "self.h.v", BOX, assign="m.h.v = 3.0", replace="m.h = Box(3.0)",
        by_dict="m.h.__dict__['v'] = 3.0", new_dict="m.h.__dict__ = {'v': 3.0}",
        other_class="class Other(Box):\n    v = property(lambda self: 3.0)\nm.h.__class__ = Other",
        shadow="Box.v = property(lambda self: 3.0)",
    ),
    "slots": attribute(
        "self.h = Slots(2.0)", "self.h.v",
        "@dataclasses.dataclass(slots=True)\nclass Slots:\n    v: float\n",
        assign="m.h.v = 3.0", replace="m.h = Slots(3.0)",
    ),
    "frozen": attribute(
        "self.h = Frozen(2.0)", "self.h.v",
        "@dataclasses.dataclass(frozen=True)\nclass Frozen:\n    v: float\n",
        around="object.__setattr__(m.h, 'v', 3.0)",
        replace="m.h = dataclasses.replace(m.h, v=3.0)",
    ),
    "list": attribute(
        "self.h = [1.0, 2.0]", "self.h[1]", item="m.h[1] = 3.0", insert="m.h.insert(0, 5.0)",
        pop="m.h.pop(0); m.h.append(3.0)", sort="m.h.sort(reverse=True)", clear="m.h.clear()",
        slice="m.h[:] = [1.0, 3.0]", replace="m.h = (1.0, 3.0)", reverse="m.h.reverse()",
    ),
    "nested": attribute(
        "self.h = {'a': [{'b': (1.0, [2.0])}]}", "self.h['a'][0]['b'][1][0]",
        deep="m.h['a'][0]['b'][1][0] = 3.0", middle="m.h['a'][0] = {'b': (1.0, [3.0])}",
        top="m.h.update(a=[{'b': (1.0, [3.0])}])",
    ),
    "dict": attribute(
        "self.h = {'a': 2.0}", "self.h.get('a', 7.0)", item="m.h['a'] = 3.0", pop="m.h.pop('a')",
        update="m.h.update(a=3.0)", union="m.h |= {'a': 3.0}", clear="m.h.clear()",
    ),
    "default_dict": attribute(
        "self.h = collections.defaultdict(lambda: 2.0)", "self.h['a']", item="m.h['a'] = 3.0",
        factory="m.h.clear(); m.h.default_factory = lambda: 3.0",
    ),
    "ordered": attribute(
        "self.h = collections.OrderedDict(a=2.0, b=3.0)", "next(iter(self.h.values()))",
        move="m.h.move_to_end('a')", item="m.h['a'] = 5.0",
    ),
    "dict_size": attribute(
        "self.h = {'a': 1, 'b': 2}", "float(len(self.h))", add="m.h['c'] = 3", remove="del m.h['a']",
    ),
    "membership": attribute(
        "self.h = {'a'}", "(2.0 if 'a' in self.h else 3.0)", remove="m.h.discard('a')",
        replace="m.h = set()",
    ),
    "deque": attribute(
        "self.h = collections.deque([2.0, 3.0])", "self.h[0]", rotate="m.h.rotate(1)",
        item="m.h[0] = 5.0", push="m.h.appendleft(3.0)",
    ),
    "chain_map": attribute(
        "self.h = collections.ChainMap({}, {'a': 2.0})", "self.h['a']", front="m.h['a'] = 3.0",
        back="m.h.maps[1]['a'] = 3.0",
    ),
    "user_dict": attribute(
        "self.h = collections.UserDict(a=2.0)", "self.h['a']", item="m.h['a'] = 3.0",
        data="m.h.data = {'a': 3.0}",
    ),
    "namespace": attribute(
        "self.h = types.SimpleNamespace(v=2.0)", "self.h.v", assign="m.h.v = 3.0",
        by_dict="m.h.__dict__.update(v=3.0)",
    ),
    "proxy": attribute(
        "self.h = types.MappingProxyType(TABLE)", "self.h['a']", "TABLE = {'a': 2.0}\n",
        behind="TABLE['a'] = 3.0",
    ),
    "weak": attribute(
        "self.h = weakref.ref(KEPT)", "self.h().v", BOX + "KEPT = Box(2.0)\n", assign="KEPT.v = 3.0",
    ),
    "bytearray": attribute("self.h = bytearray([2])", "float(self.h[0])", item="m.h[0] = 3"),
    "array": attribute(
        "self.h = array.array('d', [2.0])", "self.h[0]", item="m.h[0] = 3.0",
        view="memoryview(m.h)[0] = 3.0",
    ),
    "ctypes": attribute(
        "self.h = ctypes.c_double(2.0)", "self.h.value", assign="m.h.value = 3.0",
    ),
    "numpy": attribute(
        "self.h = np.full(8, 2.0, np.float32)", "float(self.h[3])", item="m.h[3] = 3.0",
        fill="m.h.fill(3.0)", out="np.multiply(m.h, 1.5, out=m.h)", replace="m.h = m.h + 1",
    ),
    "tensor": attribute(
        "self.h = torch.full((8,), 2.0)", "self.h", fill="m.h.fill_(3.0)", item="m.h[3] = 3.0",
        replace="m.h = torch.full((8,), 3.0)", data="m.h.data = torch.full((8,), 3.0)",
        copy="m.h.copy_(torch.arange(8.0))",
    ),
    "tensor_in_list": attribute(
        "self.h = [torch.full((8,), 2.0)]", "self.h[0]", fill="m.h[0].mul_(2)",
        replace="m.h[0] = torch.full((8,), 3.0)", out="torch.add(m.h[0], 1, out=m.h[0])",
    ),
    "global_tensor": shared(
        "TENSOR = torch.full((8,), 2.0)\n", "TENSOR", fill="TENSOR.fill_(3.0)",
        replace="global TENSOR\nTENSOR = torch.full((8,), 3.0)",
    ),
    "buffer": attribute(
        "self.register_buffer('h', torch.full((8,), 2.0))", "self.h", fill="m.h.fill_(3.0)",
        assign="m.h = torch.full((8,), 3.0)", registry="m._buffers['h'] = torch.full((8,), 3.0)",
        load="m.load_state_dict({**m.state_dict(), 'h': torch.full((8,), 3.0)})",
        other_type="m.h = torch.full((8,), 3, dtype=torch.int64)",
    ),
    "parameter": attribute(
        "self.h = nn.Parameter(torch.full((8,), 2.0))", "self.h",
        in_place="with torch.no_grad(): m.h.mul_(1.5)", data_mul="m.h.data.mul_(1.5)",
        data="m.h.data = torch.full((8,), 3.0)", data_copy="m.h.data.copy_(torch.arange(8.0))",
        replace="m.h = nn.Parameter(torch.full((8,), 3.0))",
        detached="m.h.detach().mul_(1.5)", foreach="torch._foreach_mul_([m.h.data], 1.5)",
        init="nn.init.constant_(m.h, 3.0)", view="m.h.data.view(2, 4)[1].add_(1)",
        step="m.h.grad = torch.ones(8); torch.optim.SGD([m.h], lr=0.5).step()",
        fused="m.h.grad = torch.ones(8); torch.optim.Adam([m.h], lr=0.5, fused=True).step()",
        load="m.load_state_dict({**m.state_dict(), 'h': torch.full((8,), 3.0)}, assign=True)",
        swap="a = m.h.data; m.h.data = m.h.data.clone(); m.h.data.zero_()",
    ),
    "weight": attribute(
        "self.h = nn.Linear(8, 8)", "self.h(x)", data_mul="m.h.weight.data.mul_(1.5)",
        row="m.h.weight.data[0] = 0.0", tie="m.h.weight = m.inner.weight",
        replace="m.h = nn.Linear(8, 8)", no_bias="m.h.bias = None", zero="m.h.requires_grad_(False).weight.zero_()",
        identity="m.h = nn.Identity()", reset="m.h.reset_parameters()",
        prune="torch.nn.utils.prune.l1_unstructured(m.h, 'weight', 0.5)",
        weight_norm="torch.nn.utils.parametrizations.weight_norm(m.h); m.h.parametrizations.weight.original0.data.mul_(2)",
        vector="nn.utils.vector_to_parameters(torch.arange(72.0) / 72, m.h.parameters())",
        forward="m.h.forward = lambda x: x * 3", double="m.double().float(); m.h.weight.data.mul_(2)",
    ),
    "norm": attribute(
        "self.h = nn.LayerNorm(8)", "self.h(x)", eps="m.h.eps = 0.5",
        weight="m.h.weight.data.fill_(2)", no_weight="m.h.weight = None",
    ),
    "dropout": attribute(
        "self.h = nn.Dropout(1.0)", "self.h(x)", train="m.h.train()", all="m.train()",
        flag="m.h.training = True",
    ),
    "batch_norm": attribute(
        "self.h = nn.BatchNorm1d(8)", "self.h(x)", mean="m.h.running_mean.fill_(1.0)",
        var="m.h.running_var.mul_(4)", train="m.h.train()", momentum="m.h.eps = 0.5",
    ),
    "sequential": attribute(
        "self.h = nn.Sequential(nn.Linear(8, 8), nn.ReLU())", "self.h(x)",
        append="m.h.append(nn.Tanh())", item="m.h[1] = nn.Tanh()", delete="del m.h[1]",
        insert="m.h.insert(0, nn.Tanh())", registry="m.h._modules['1'] = nn.Tanh()",
        order="m.h._modules.move_to_end('0')",
    ),
    "module_list": attribute(
        "self.h = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])",
        "functools.reduce(lambda a, l: torch.relu(l(a)), self.h, x)", pop="m.h.pop(0)",
        append="m.h.append(nn.Linear(8, 8))", slice="m.h = m.h[:1]", swap="m.h[0], m.h[1] = m.h[1], m.h[0]",
    ),
    "module_dict": attribute(
        "self.h = nn.ModuleDict({'a': nn.Tanh()}); self.k = 'a'", "self.h[self.k](x)",
        item="m.h['a'] = nn.ReLU()", key="m.h['b'] = nn.ReLU(); m.k = 'b'",
    ),
    "hooks": attribute(
        "self.h = nn.Linear(8, 8)", "self.h(x)",
        after="m.h.register_forward_hook(lambda mod, a, out: out * 3)",
        before="m.h.register_forward_pre_hook(lambda mod, a: (a[0] * 3,))",
        on_model="m.register_forward_hook(lambda mod, a, out: out * 3)",
        on_model_before="m.register_forward_pre_hook(lambda mod, a: (a[0] * 3,))",
        with_kwargs="m.h.register_forward_hook(lambda mod, a, k, out: out + 1, with_kwargs=True)",
    ),
    "global": shared(
        "VALUE = 2.0\n", "VALUE", assign="global VALUE\nVALUE = 3.0", by_dict="globals()['VALUE'] = 3.0",
        by_module="sys.modules[__name__].VALUE = 3.0", delete="del globals()['VALUE']",
    ),
    "builtin": shared(
        "", "float(abs(-2))", shadow="globals()['abs'] = lambda v: 3.0",
    ),
    "other_module": shared(
        "other = types.ModuleType('other'); other.sub = types.ModuleType('other.sub')\nother.sub.V = 2.0\n",
        "other.sub.V", assign="other.sub.V = 3.0",
        replace="new = types.ModuleType('n'); new.V = 3.0; other.sub = new",
    ),
    "lazy_module": shared(
        "lazy = types.ModuleType('lazy'); lazy.__getattr__ = lambda name: 2.0\n", "lazy.V",
        shadow="lazy.V = 3.0", getter="lazy.__getattr__ = lambda name: 3.0",
    ),
    "function": shared(
        "def scale(): return 2.0\n", "scale()", code="scale.__code__ = (lambda: 3.0).__code__",
        replace="globals()['scale'] = lambda: 3.0",
    ),
    "default": shared(
        "def scale(v=2.0, *, w=1.0): return v * w\n", "scale()", defaults="scale.__defaults__ = (3.0,)",
        keywords="scale.__kwdefaults__['w'] = 3.0", new_keywords="scale.__kwdefaults__ = {'w': 3.0}",
    ),
    "mutable_default": shared(
        "def scale(v=[2.0]): return v[0]\n", "scale()", item="scale.__defaults__[0][0] = 3.0",
    ),
    "function_attribute": shared(
        "def scale(): return scale.v\nscale.v = 2.0\n", "scale()", assign="scale.v = 3.0",
        by_dict="scale.__dict__['v'] = 3.0",
    ),
    "closure": shared(
        "def make():\n    v = 2.0\n    def get(): return v\n    def put(n):\n        nonlocal v\n        v = n\n"
        "    return get, put\nget, put = make()\n",
        "get()", put="put(3.0)", cell="get.__closure__[0].cell_contents = 3.0",
        replace="globals()['get'] = lambda: 3.0",
    ),
    "partial": attribute(
        "self.h = functools.partial(pick, box=[2.0])", "self.h()", "def pick(box, i=0): return box[i]\n",
        deep="m.h.keywords['box'][0] = 3.0", keyword="m.h.keywords['box'] = [3.0]",
        state="m.h.__setstate__((pick, (), {'box': [3.0]}, {}))",
        replace="m.h = functools.partial(pick, [3.0])",
    ),
    "partial_of_class": Holder(
        module="BACK = [2.0]\ndef pick(box): return box[0]\n", read="self.scale()",
        methods="    scale = functools.partial(pick, BACK)\n",
        edits={"item": "BACK[0] = 3.0", "replace": "Model.scale = functools.partial(pick, [3.0])"},
    ),
    "partial_method": Holder(
        module="BACK = [2.0]\ndef pick(self, box, by): return box[0] * by\n", read="self.scale()",
        methods="    scale = functools.partialmethod(pick, BACK, by=1.0)\n",
        edits={"item": "BACK[0] = 3.0", "keyword": "Model.__dict__['scale'].keywords['by'] = 2.0",
               "replace": "Model.scale = functools.partialmethod(pick, [3.0], by=1.0)"},
    ),
    "class_item": shared(
        "class Table:\n    at = {1: 2.0}\n    def __class_getitem__(cls, i): return cls.at[i]\n", "Table[1]",
        item="Table.at[1] = 3.0", replace="Table.__class_getitem__ = classmethod(lambda cls, i: 3.0)",
    ),
    "bases": shared(
        "class A: pass\nclass C: pass\nclass B(A): pass\nheld = B()\n", "(2.0 if isinstance(held, A) else 3.0)",
        bases="B.__bases__ = (C,)", other="held.__class__ = C",
    ),
    "cached": shared(
        "BACK = [2.0]\n@functools.lru_cache\ndef scale(): return BACK[0]\n", "scale()", False,
        cleared="BACK[0] = 3.0; scale.cache_clear()", kept="BACK[0] = 3.0",
    ),
    "cached_property": Holder(
        module=BOX, init="self.box = [2.0]", read="self.h",
        methods="    @functools.cached_property\n    def h(self): return self.box[0]\n",
        edits={"assign": "m.h = 3.0", "forget": "m.box[0] = 3.0; m.__dict__.pop('h', None)",
               "behind": "m.box[0] = 3.0"}, control=False,
    ),
    "property": Holder(
        init="self.box = [2.0]", read="self.h",
        methods="    @property\n    def h(self): return self.box[0]\n",
        edits={"behind": "m.box[0] = 3.0", "replace": "Model.h = property(lambda self: 3.0)"},
    ),
    "method": Holder(
        read="self.scale()", methods="    def scale(self): return 2.0\n",
        edits={"on_class": "Model.scale = lambda self: 3.0", "on_instance": "m.scale = lambda: 3.0",
               "code": "Model.scale.__code__ = (lambda self: 3.0).__code__",
               "class": "class Sub(Model):\n    def scale(self): return 3.0\nm.__class__ = Sub"},
    ),
    "static": Holder(
        read="self.scale()", methods="    @staticmethod\n    def scale(): return 2.0\n",
        edits={"replace": "Model.scale = staticmethod(lambda: 3.0)"},
    ),
    "class_method": Holder(
        read="self.scale()", methods="    v = 2.0\n    @classmethod\n    def scale(cls): return cls.v\n",
        edits={"value": "Model.v = 3.0", "replace": "Model.scale = classmethod(lambda cls: 3.0)"},
    ),
    "descriptor": Holder(
        module="class Field:\n    v = 2.0\n    def __get__(self, o, t): return self.v\n",
        methods="    h = Field()\n", read="self.h",
        edits={"value": "Model.__dict__['h'].v = 3.0", "class": "Field.v = 3.0",
               "get": "Field.__get__ = lambda self, o, t: 3.0"},
    ),
    "getattr_hook": Holder(
        init="self.table = {'h': 2.0}", read="self.h",
        methods="    def __getattr__(self, n):\n        t = self.__dict__.get('table', {})\n"
                "        return t[n] if n in t else super().__getattr__(n)\n",
        edits={"table": "m.table['h'] = 3.0", "shadow": "m.__dict__['h'] = 3.0"}, control=False,
    ),
    "metaclass": shared(
        "class Meta(type):\n    v = 2.0\nclass Options(metaclass=Meta): pass\n", "Options.v",
        meta="Meta.v = 3.0", shadow="Options.v = 3.0",
    ),
    "enum": attribute(
        "self.h = Level.LOW", "float(self.h)",
        "class Level(enum.IntEnum):\n    LOW = 2\n    HIGH = 3\n", assign="m.h = Level.HIGH",
    ),
    "callable": attribute(
        "self.h = Call()", "self.h()", "class Call:\n    v = 2.0\n    def __call__(self): return self.v\n",
        value="m.h.v = 3.0", call="Call.__call__ = lambda self: 3.0",
        other="m.h = lambda: 3.0",
    ),
    "operators": attribute(
        "self.h = Number()", "(self.h + 1.0)",
        "class Number:\n    v = 1.0\n    def __add__(self, o): return self.v + o\n",
        value="m.h.v = 2.0", add="Number.__add__ = lambda self, o: 3.0",
    ),
    "custom_list": attribute(
        "self.h = Row([2.0])", "self.h[0]",
        "class Row(list):\n    by = 1.0\n    def __getitem__(self, i): return super().__getitem__(i) * self.by\n",
        item="list.__setitem__(m.h, 0, 3.0)", by="m.h.by = 3.0", on_class="Row.by = 3.0",
    ),
    "environment": shared(
        "os.environ['RANDOM_EDIT'] = '2.0'\n", "float(os.environ['RANDOM_EDIT'])", False,
        assign="os.environ['RANDOM_EDIT'] = '3.0'", delete="del os.environ['RANDOM_EDIT']",
    ),
    "context": shared(
        "CONTEXT = contextvars.ContextVar('c', default=2.0)\n", "CONTEXT.get()", False,
        set="CONTEXT.set(3.0)",
    ),
    "thread_local": shared(
        "LOCAL = threading.local(); LOCAL.v = 2.0\n", "getattr(LOCAL, 'v', 5.0)", False,
        assign="LOCAL.v = 3.0", delete="del LOCAL.v",
    ),
    "file": shared(
        "PATH = tempfile.mkstemp()[1]\ndef put(v):\n    with open(PATH, 'w') as f: f.write(v)\n"
        "def get():\n    with open(PATH) as f: return float(f.read())\nput('2.0')\n",
        "get()", False, write="put('3.0')", remove="os.remove(PATH)",
    ),
    "patched_torch": shared(
        "", "F.silu(x)", on_functional="saved = F.silu; F.silu = lambda x: x * 3; AFTER.append(lambda: setattr(F, 'silu', saved))",
        on_tensor="saved = torch.Tensor.clamp; torch.Tensor.clamp = lambda s, *a, **k: s * 0; AFTER.append(lambda: setattr(torch.Tensor, 'clamp', saved))",
    ),
    "default_dtype": shared(
        "", "torch.zeros(8).to(torch.get_default_dtype()).element_size()", False,
        dtype="torch.set_default_dtype(torch.float64); AFTER.append(lambda: torch.set_default_dtype(torch.float32))",
    ),
}

EFFECTS: dict[str, Holder] = {
    "prints": Holder(read="note(2.0)", module="def note(v):\n    print('called', v)\n    return v\n"),
    "appends": Holder(init="self.log = []", read="(self.log.append(1) or 2.0)", state="len(m.log)"),
    "counts": Holder(
        init="self.n = 0", read="self.tick()", state="m.n",
        methods="    def tick(self):\n        self.n += 1\n        return 2.0\n", edits={"reset": "m.n = 10"},
    ),
    "counts_and_reads": Holder(
        init="self.n = 0", read="self.tick()", state="m.n",
        methods="    def tick(self):\n        self.n += 1\n        return float(self.n)\n",
    ),
    "counts_in_global": Holder(
        module="SEEN = {'n': 0}\ndef tick():\n    SEEN['n'] += 1\n    return 2.0\n", read="tick()",
        state="SEEN['n']",
    ),
    "class_counter": Holder(
        methods="    n = 0\n    def tick(self):\n        type(self).n += 1\n        return 2.0\n",
        read="self.tick()", state="Model.n",
    ),
    "iterator": Holder(init="self.h = itertools.count(2)", read="float(next(self.h))", state="repr(m.h)"),
    "generator": Holder(
        module="def numbers():\n    v = 2.0\n    while True:\n        yield v\n        v += 1\n",
        init="self.h = numbers()", read="next(self.h)",
    ),
    "queue": Holder(init="self.q = queue.Queue()", read="(self.q.put(1) or 2.0)", state="m.q.qsize()"),
    "python_random": Holder(read="random.random()", state="random.getstate()[1][-1]",
                            edits={"seed": "random.seed(7)"}),
    "numpy_random": Holder(read="float(np.random.rand())", state="np.random.get_state()[2]",
                           edits={"seed": "np.random.seed(7)"}),
    "torch_random": Holder(read="torch.rand(8)", state="float(torch.get_rng_state().sum())",
                           edits={"seed": "torch.manual_seed(7)"}),
    "own_random": Holder(init="self.h = random.Random(1)", read="self.h.random()"),
    "writes_file": Holder(
        module="PATH = tempfile.mkstemp()[1]\ndef note():\n    with open(PATH, 'a') as f: f.write('.')\n    return 2.0\n",
        read="note()", state="os.path.getsize(PATH)",
    ),
    "buffer_write": Holder(
        init="self.register_buffer('n', torch.zeros(()))", read="self.n.add_(1)", state="float(m.n)",
    ),
    "keeps_input": Holder(
        init="self.last = None", read="self.keep(x)", state="None if m.last is None else float(m.last.sum())",
        methods="    def keep(self, x):\n        self.last = x\n        return 2.0\n",
    ),
    "warns": Holder(
        module="def note():\n    WARNED.append(1)\n    warnings.warn('of the user')\n    return 2.0\nWARNED = []\n",
        read="note()", state="len(WARNED)",
    ),
    "logs": Holder(
        module="class Count(logging.Handler):\n    n = 0\n    def emit(self, r): Count.n += 1\n"
               "LOG = logging.getLogger(__name__); LOG.addHandler(Count()); LOG.setLevel(10); LOG.propagate = False\n",
        read="(LOG.info('x') or 2.0)", state="Count.n", edits={"level": "LOG.setLevel(50)"},
    ),
    "raises": Holder(
        init="self.left = 2", read="self.spend()", state="m.left",
        methods="    def spend(self):\n        self.left -= 1\n        if self.left < 0: raise ValueError('spent')\n        return 2.0\n",
        edits={"more": "m.left = 5"},
    ),
    "writes_input": Holder(read="x.add_(1)", state="float(X.sum())"),
    "clock": Holder(read="(2.0 if time.monotonic() > T0 else 3.0)", module="T0 = time.monotonic() - 1\n"),
}
