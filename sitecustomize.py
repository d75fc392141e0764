"""Guards Apple's mlx_lm.server. Python runs this file at start-up: its folder is on PYTHONPATH.

It puts one finder on sys.meta_path, then runs the sitecustomize that it shadows. The shim itself is
loaded just before mlx_lm runs. MLX_SHIM=0 turns it all off. Must parse on Python 2.7 to 3.14."""
import os
import sys

class MlxLmShimFinder(object):
    def find_spec(self, name, path=None, target=None):
        finders = [f for f in sys.meta_path if f is not self] if name == "mlx_lm" else []
        specs = (f.find_spec(name, path, target) for f in finders if hasattr(f, "find_spec"))
        spec = next((s for s in specs if s), None)
        if spec and hasattr(spec.loader, "exec_module"):
            spec.loader = MlxLmShimLoader(self, spec.loader)
        return spec

class MlxLmShimLoader(object):
    def __init__(self, finder, stock):
        self.finder, self.stock = finder, stock
    def __getattr__(self, name):
        return getattr(self.stock, name)
    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self.stock
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
            try:
                start()
            except (Exception, SystemExit) as error:
                sys.stderr and sys.stderr.write("mlx-lm-shim: not active: %r\n" % error)
        self.stock.exec_module(module)

def start():
    from importlib import import_module, machinery, util
    here = os.path.dirname(os.path.realpath(__file__))
    folders = os.path.join(here, "shim"), os.path.dirname(here)  # in a wheel, the second
    init = next(i for i in (os.path.join(f, "__init__.py") for f in folders) if os.path.isfile(i))
    name, known = "shim", sys.modules.get("shim") or machinery.PathFinder.find_spec("shim")
    file = getattr(known, "__file__", None) or getattr(known, "origin", None) or ""
    if os.path.realpath(file) != init:
        name = "_mlx_lm_shim"  # a program may have a module "shim" of its own: it keeps the name
        sys.modules[name] = module = util.module_from_spec(util.spec_from_file_location(name, init))
        module.__loader__.exec_module(module)
    import_module(name + ".boot").start()

OFF = os.environ.get("MLX_SHIM", "").strip().lower() in ("0", "off", "false", "no")
THERE = "MlxLmShimFinder" in [type(f).__name__ for f in sys.meta_path]
if sys.version_info >= (3, 10) and not OFF and not THERE:
    sys.meta_path.insert(0, MlxLmShimFinder())
if vars(sys.modules.get(__name__, os)) is globals():  # a program that runs this file does the rest
    here = os.stat(os.path.dirname(__file__) or ".")[1:3]  # inode and device, equal through a link
    found = [(i, p) for i, p in enumerate(sys.path) if os.path.exists(str(p))]
    ours = [(i, p) for i, p in found if os.stat(p)[1:3] == here]
    sys.path[:] = others = [p for p in sys.path if p not in dict(ours).values()]
    this = sys.modules.pop(__name__)  # held: Python 2 empties a module that nothing holds
    try:
        import sitecustomize  # noqa: F401  # its exception reaches Python as without the shim
    finally:
        for i, p in [] if OFF else ours:
            first = sys.path.index(others[0]) if others and others[0] in sys.path else 0
            sys.path.insert(i + first, p)
