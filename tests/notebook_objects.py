"""Objects as notebooks have them.

An entry is a cell that makes ``x``, and behind the arrow another one whose value shows what ``x`` is.
"""

from __future__ import annotations

from importlib.util import find_spec

IMPORTS = """
import asyncio, collections, collections.abc, concurrent.futures, contextlib, copy, dataclasses
import enum, functools, hashlib, io, json, logging, multiprocessing, os, os.path, queue, random
import re, struct, subprocess, sys, threading, types, typing, weakref, zipfile
import numpy as np, pandas as pd, polars as pl, pyarrow as pa, torch, torch.fx
import torch.utils.data
k = 3
"""
"""First cell of the notebook."""

_PYTHON = r"""
x = {}; x['x'] = (x, [x])
-> x['x'][0] is x, x['x'][1][0] is x

x = object(); y = {'key': x}
-> y['key'] is x

x = print, len, [].append, str.upper, dict.fromkeys
-> x[1]('ab'), x[3]('a'), x[4]('ab')

x = int, list[int], dict[str, int], int | None, tuple[int, ...]
-> x

x = typing.ParamSpec('x', bound=list)
-> x.__name__, x.__bound__, x.__module__

x = typing.ParamSpec('x'); y = x.args, typing.Callable[x, int]
-> y[0].__origin__ is x, y[1].__args__[0] is x

class Q(typing.Generic[typing.TypeVar('T')]):
    def __reduce__(self): return 'x'
x = Q(); x.v = 2
-> x.v, type(x) is Q, copy.copy(x) is x

class x(typing.TypedDict): a: int
-> x(a=1), x.__annotations__

class x(typing.Protocol):
    def m(self): ...
-> x.__name__, issubclass(x, typing.Protocol)

P = collections.namedtuple('Q', 'a'); x = P(1)
-> x.a, type(x) is P

x = collections.defaultdict(lambda: [k]); k = 5
-> x['new'], len(x)

x = types.MappingProxyType({'a': 1})
-> x['a'], type(x).__name__

class x(enum.IntFlag):
    A = 1
    B = 2
-> x.A | x.B, x(3) == x.A | x.B

class x(enum.Enum):
    A = 'a'
    def up(self): return self.value.upper()
-> x.A.up(), x('a') is x.A
"""

_DATA = r"""
@dataclasses.dataclass(frozen=True, slots=True)
class P:
    a: int = 1
x = {P(): 2}
-> x[P()], repr(x)

@dataclasses.dataclass
class A:
    a: int = 1
@dataclasses.dataclass
class B(A):
    b: 'A' = None
x = B(b=A())
-> x, dataclasses.fields(x)[1].name

import attr
@attr.s(auto_attribs=True)
class P:
    a: int = attr.ib(converter=int)
x = P('4')
-> x.a, x == P(4), hash is None

import attrs
@attrs.frozen
class P:
    a: int = attrs.field(validator=attrs.validators.gt(0))
x = P(4)
-> x, attrs.evolve(x, a=5), hash(x) == hash(P(4))

import pydantic
class A(pydantic.BaseModel):
    a: int = pydantic.Field(1, gt=0)
class B(pydantic.BaseModel):
    a: A
x = B(a={'a': 2})
-> x.a.a, B.model_validate({'a': {'a': 3}}).a.a

class L(list):
    def first(self): return self[0]
x = L([1, 2]); x.tag = 't'
-> x.first(), x.tag, x[:]

class P:
    def __getstate__(self): return {'a': 5}
x = P(); x.a = 1
-> x.a > 0

class P:
    def __init__(self, a): self.a = a
    def __getnewargs__(self): return (1,)
    def __new__(cls, a): return super().__new__(cls)
x = P(4)
-> x.a

class P:
    def __eq__(self, o): return o.a == self.a
    def __hash__(self): return hash(self.a)
x = P(); x.a = 1; y = {x: 'v'}
-> y[x], len(y)

class P: pass
P.a = property(lambda self: self.b * 2)
x = P(); x.b = 2
-> x.a

class M(type):
    def __call__(cls, *a): return super().__call__()
    def twice(cls): return cls.n * 2
class x(metaclass=M): n = 2
-> x.twice()

class D:
    def __get__(self, o, t): return 7
    def __set_name__(self, o, n): self.n = n
class x: a = D()
-> x.a, vars(x)['a'].n

class A:
    def f(self): return [A]
class B(A):
    def f(self): return [*super().f(), B]
x = B().f
-> x() == [A, B]

class x:
    class y:
        class z: v = 1
y = x.y.z()
-> y.v, type(y) is x.y.z, type(y).__qualname__

class x:
    @staticmethod
    def s(): return 1
    @classmethod
    def c(cls): return cls.__name__
    @property
    def p(self): return 3
-> x.s(), x.c(), x().p

class x:
    @functools.cached_property
    def p(self): return [1]
x = x()
-> x.p is x.p, x.p

x = n = []
for _ in range(400): n.append([]); n = n[0]
-> str(x).count('[')
"""

_FUNCTIONS = r"""
def make():
    n = 0
    def up():
        nonlocal n
        n += 1
        return n
    def get(): return n
    return up, get
x, y = make()
-> x(), x(), y()

def a(n): return b(n)
def b(n): return a(n - 1) if n else 'end'
x = a
-> x(3)

def x(a: int = k, *, b: 'str' = 'c') -> list: 'doc'
x.tag = 1
-> x.__annotations__, x.__doc__, x.tag, x.__defaults__

def f(a, b): return a - b
x = functools.partial(functools.partial(f, 9), b=k)
-> x()

@functools.lru_cache(maxsize=1)
def x(a): return [a, k]
-> x(1), x.cache_info().maxsize, x.cache_parameters()

class C:
    @functools.singledispatchmethod
    def m(self, a): return 'any'
    @m.register
    def _(self, a: int): return 'int'
x = C()
-> x.m(1), x.m('')

def d(f):
    @functools.wraps(f)
    def w(*a): return [f(*a)]
    return w
@d
def x(a): 'doc'; return a
-> x(1), x.__name__, x.__doc__, x.__wrapped__(2)

@contextlib.contextmanager
def x(): yield k
-> with x() as v: pass
-> v

async def x(): return k
-> await x()

async def x():
    yield k
-> [v async for v in x()]

class C:
    def m(self): return self.v
x = C(); x.v = 3; y = x.m
-> x.v = 4
-> y(), y.__self__ is x

def outer():
    class C:
        def me(self): return C
    return C
x = outer()
-> x().me() is x, x.__qualname__

def x(): return __name__, globals() is x.__globals__
-> x()
"""

_STANDARD = r"""
x = random.Random(3); x.random()
-> x.random(), x.choice('abc')

x = ValueError('a', 1); x.add_note('note'); x.extra = 2
-> x.args, x.__notes__, x.extra

class E(Exception):
    def __init__(self, code): super().__init__(f'code {code}'); self.code = code
x = E(3)
-> str(x), x.code

x = ExceptionGroup('g', [ValueError(1), KeyError('k')])
-> x.message, repr(x.exceptions)

x = OSError(2, 'gone', 'file'), UnicodeDecodeError('utf8', b'x', 0, 1, 'why'), SystemExit(3)
-> x[0].filename, str(x[1]), x[2].code

try: 1 / 0
except Exception as error: x = error
-> repr(x)

class C: v = 1
y = C(); x = weakref.WeakSet([y])
-> [each.v for each in x]

x = np.array([k, None], object); x.flags.writeable = False
-> x.tolist(), x.flags.writeable

class C: v = 1
y = C(); gone = C(); x = weakref.ref(y), weakref.ref(gone, print); del gone
-> x[0]().v, x[1]()

class C: v = 1
y = C(); x = weakref.WeakValueDictionary(a=y), weakref.WeakKeyDictionary({y: 2})
-> x[0]['a'].v, list(x[1].values()), list(x[1]) == [x[0]['a']]

x = logging.getLogger('mine.part')
-> x.name, x is logging.getLogger('mine.part')

x = sys.stdout, sys.stderr
-> x[0] is sys.stdout, x[1] is sys.stderr

x = types.ModuleType('mine'); x.v = 3
-> x.v, x.__name__

x = json, os.path, collections.abc
-> x[0].dumps(1), x[1].sep, x[2].Mapping.__name__
"""

_ARRAYS = r"""
x = np.zeros(0), np.zeros((3, 0)), np.array(5)
-> [(a.shape, a.tolist()) for a in x]

x = np.array(['a', None, 3], object)
-> x.tolist()

x = np.arange(10)[::3].astype('>i4')
-> x.dtype.str, x.tolist()

x = np.random.default_rng(3); x.random()
-> x.random(), x.integers(9)

x = np.random.RandomState(3); x.rand()
-> x.rand()

x = np.dtype('f4'), np.float32, np.newaxis, np.sin
-> x[0], x[1](2), x[3](0.0)
"""

_TORCH = r"""
x = torch.ones(2, requires_grad=True)
-> (x * 2).sum().backward()
-> x.grad.tolist(), x.is_leaf

x = torch.tensor([1 + 2j]).conj(), torch.tensor([1j]).imag
-> x[0].tolist(), x[0].is_conj(), x[1].tolist()

x = torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()
-> [t.to_dense().tolist() for t in x]

x = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
-> x.dequantize().tolist()

x = torch.float32, torch.device('cpu'), torch.Size([1, 2]), torch.strided
-> x

x = torch.Generator().manual_seed(3); torch.rand(1, generator=x)
-> torch.rand(2, generator=x).tolist()

class T(torch.Tensor): pass
x = torch.ones(2).as_subclass(T); x.tag = 3
-> type(x) is T, x.tolist(), x.tag

x = torch.nn.Linear(2, 2)
y = torch.optim.Adam(x.parameters())
x(torch.ones(2)).sum().backward()
y.step()
-> all(a is b for a, b in zip(x.parameters(), y.param_groups[0]['params']))

x = torch.nn.Linear(2, 2); x.other = torch.nn.Linear(2, 2); x.other.weight = x.weight
-> x.weight is x.other.weight

class N(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.l = torch.nn.Linear(2, 1)
        self.register_buffer('b', torch.ones(1), False)
    def forward(self, v): return self.l(v) * k + self.b
x = N().eval()
-> x(torch.ones(2)).shape, x.training, list(x.state_dict()), x.b.item()

x = torch.nn.utils.spectral_norm(torch.nn.Linear(2, 2)).eval()
-> x(torch.ones(2)).tolist()

x = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)).eval()
-> x(torch.ones(2)).tolist(), type(x).__name__

x = torch.nn.Sequential(torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(2, 2))).eval()
-> x(torch.ones(2)).tolist()

import torch.nn.utils.prune as prune
x = prune.l1_unstructured(torch.nn.Linear(2, 2), 'weight', amount=1)
-> x(torch.ones(2)).tolist(), sorted(n for n, _ in x.named_buffers())

x = torch.nn.Linear(2, 2); h = x.register_forward_hook(lambda m, i, o: o * 0 + k)
-> x(torch.ones(2)).tolist()

x = torch.nn.Linear(1, 1)
h = x.register_full_backward_hook(lambda m, i, o: seen.append(1))
seen = []
-> x(torch.ones(1)).sum().backward()
-> seen

x = torch.ones(1, requires_grad=True); h = x.register_hook(lambda g: g * k)
-> x.sum().backward()
-> x.grad.item()

x = torch.jit.script(torch.nn.Linear(2, 1))
-> x(torch.ones(2)).tolist()

x = torch.jit.trace(torch.nn.Linear(2, 1), torch.ones(2))
-> x(torch.ones(2)).tolist()

@torch.jit.script
def x(a: int): return a + 1
-> x(1)

x = torch.fx.symbolic_trace(torch.nn.Linear(2, 1))
-> x(torch.ones(2)).tolist()

x = torch.compile(torch.nn.Linear(2, 1), backend='eager')
-> x(torch.ones(2)).shape

m = torch.nn.Linear(1, 1)
y = torch.optim.SGD(m.parameters(), 0.1, 0.9)
x = torch.optim.lr_scheduler.StepLR(y, 1)
-> x.optimizer is y
-> y.step(); x.step()
-> y.param_groups[0]['lr']

m = torch.nn.Linear(1, 1)
y = torch.optim.SGD(m.parameters(), 1.0)
x = torch.optim.lr_scheduler.LambdaLR(y, lambda e: 1 / (e + k))
-> y.step(); x.step()
-> x.get_last_lr()

x = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
-> x.n_averaged.item(), x(torch.ones(1)).shape

d = torch.utils.data.TensorDataset(torch.arange(4)); x = torch.utils.data.DataLoader(d, 2)
-> [b[0].tolist() for b in x]

d = torch.utils.data.TensorDataset(torch.arange(4))
x = torch.utils.data.DataLoader(d, 2, num_workers=1, persistent_workers=True)
-> x.persistent_workers, x.num_workers, len(x), x.dataset[3][0].item()

class D(torch.utils.data.Dataset):
    def __len__(self): return 3
    def __getitem__(self, i): return i * k
x = torch.utils.data.DataLoader(D(), 3, collate_fn=lambda b: b)
-> list(x)

x = torch.distributions.Normal(torch.zeros(1), torch.ones(1))
-> x.log_prob(torch.zeros(1)).tolist()

class F(torch.autograd.Function):
    @staticmethod
    def forward(c, v): return v * 2
    @staticmethod
    def backward(c, g): return g * k
x = F.apply
-> v = torch.ones(1, requires_grad=True); x(v).backward()
-> v.grad.item()

x = copy.deepcopy(torch.nn.LSTM(2, 3)).eval()
-> x(torch.ones(1, 1, 2))[0].shape, x._flat_weights[0] is x.weight_ih_l0
"""

_TABLES = r"""
x = pd.DataFrame({'a': [1, 2], 'b': ['u', None]}, index=['r', 's'])
-> repr(x), x.dtypes.astype(str).tolist()

x = pd.Series([1, 2], dtype='int64[pyarrow]')
-> x.sum(), str(x.dtype)

x = pd.MultiIndex.from_product([['a', 'b'], [1, 2]], names=['l', 'n'])
-> x.tolist(), x.names

x = pd.DataFrame({'a': [1, 1, 2]}).groupby('a')
-> x.size().to_dict()

x = pd.Timestamp('2024-01-01', tz='UTC'), pd.Timedelta('1D'), pd.NaT, pd.NA, pd.Period('2024-01')
-> repr(x)

x = struct.Struct('<if'), torch.finfo(torch.bfloat16), torch.iinfo(torch.int8)
-> x[0].size, x[1], x[2]

class D(pd.DataFrame):
    _metadata = ['tag']
    @property
    def _constructor(self): return D
x = D({'a': [1]}); x.tag = 't'
-> type(x) is D, x.tag, x.a.tolist()

x = pd.DataFrame({'a': [[1], {'k': 2}]})
-> x.a.tolist()

x = pl.DataFrame({'a': [1, None], 'b': ['u', 'v']})
-> x.to_dicts(), x.schema

x = pl.LazyFrame({'a': [1, 2]}).filter(pl.col('a') > 1)
-> x.collect().to_dicts()

x = pl.col('a') * 2, pl.Series('s', [1, 2]), pl.Int8, pl.Enum(['a'])
-> pl.DataFrame({'a': [1]}).select(x[0]).to_dicts(), x[1].to_list(), x[2], str(x[3])

x = pa.table({'a': [1, 2], 'b': [['x'], None]})
-> x.to_pylist(), str(x.schema)

x = pa.array(np.arange(100_000))[5:8]
-> x.to_pylist()

import pyarrow.compute as pc
x = pc.field('a') > 1
-> pa.table({'a': [1, 2]}).filter(x).to_pylist()

from sklearn.linear_model import LogisticRegression
x = LogisticRegression().fit([[0], [1]], [0, 1])
-> x.predict([[0], [1]]).tolist(), x.coef_.shape

from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, FunctionTransformer
x = make_pipeline(StandardScaler(), FunctionTransformer(lambda v: v * k)).fit([[0], [2]])
-> x.transform([[4]]).tolist()

from tqdm import tqdm
x = tqdm
-> list(x([1], disable=True))
"""

_JAX = r"""
import jax
x = jax.numpy.arange(6.0).reshape(2, 3); y = {'w': x, 'b': [x[0]]}
-> np.asarray(x).tolist(), x.shape, str(x.dtype), float(y['b'][0].sum()), y['w'] is x
"""

_REFUSED = r"""
class C: pass
x = C(); x.lock = threading.Condition()
-> lock

x = threading.Thread(target=print)
-> lock

x = queue.Queue()
-> lock

x = [open('/etc/hostname', 'rb', 0)]
-> open file

x = open('/etc/hostname'); x.close()
-> closed file

x = zipfile.ZipFile(io.BytesIO(), 'w')
-> RLock

x = sys._getframe()
-> frame

try: 1 / 0
except Exception as e: x = e.__traceback__
-> traceback

async def f(): pass
x = f()
-> coroutine

from tqdm import tqdm
x = tqdm([1], disable=True)
-> progress bar

import contextvars
x = contextvars.ContextVar('x', default=3)
-> ContextVar

import contextvars
x = contextvars.copy_context()
-> Context

x = torch.nn.Linear(1, 1); x.lock = threading.Lock()
-> x.lock

x = iter(torch.utils.data.DataLoader([1]))
-> call iter() inside the cell

x = concurrent.futures.ThreadPoolExecutor(1)
-> cannot be sent

x = concurrent.futures.Future()
-> lock

x = subprocess.Popen(['true']); x.wait()
-> lock

x = multiprocessing.Queue()
-> cannot be sent

x = re.finditer('a', 'aa')
-> callable_iterator

x = os.scandir('/')
-> ScandirIterator

x = hashlib.sha256()
-> HASH

x = asyncio.Queue().__class__, asyncio.new_event_loop()
-> cannot be sent

lock = threading.Lock()
class x:
    held = lock
-> lock
"""


def _entries(*texts: str) -> dict[str, str]:
    """Return the cells that make objects, and the cells that use them."""
    found = {}
    for text in texts:
        for entry in text.strip().split("\n\n"):
            setup, *use = entry.split("\n-> ")
            found[setup] = "\n".join(use)
    return found


_IF_INSTALLED = (_JAX,) if find_spec("jax") else ()
OBJECTS = _entries(_PYTHON, _DATA, _FUNCTIONS, _STANDARD, _ARRAYS, _TORCH, _TABLES, *_IF_INSTALLED)
REFUSED = _entries(_REFUSED)
"""Objects that are refused: a word of the refusal."""
