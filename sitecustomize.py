"""Guards Apple's mlx_lm.server: Python runs this file at start-up because its folder is on PYTHONPATH.

It puts one finder on sys.meta_path and gives way to the sitecustomize it shadows. The shim itself is loaded just before
mlx_lm runs, in no other process. With MLX_SHIM=0 it is as if we were not here. Must parse on Python 2.7 to 3.14.
"""

import os
import sys


class MlxLmShimFinder(object):
    def find_spec(self, name, path=None, target=None):
        if name != "mlx_lm":
            return None
        finders = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        spec = next((s for s in (f.find_spec(name, path, target) for f in finders) if s), None)
        loader = spec and spec.loader

        def exec_module(module):
            del loader.exec_module  # the loader is its own self again before anybody looks at it
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                try:
                    start()
                except BaseException as error:
                    sys.stderr and sys.stderr.write("mlx-lm-shim: not active: %r\n" % error)
            loader.exec_module(module)

        if hasattr(loader, "exec_module"):
            loader.exec_module = exec_module
        return spec


def start():
    from importlib import import_module, util

    here = os.path.dirname(os.path.realpath(__file__))
    inits = [os.path.join(folder, "__init__.py") for folder in (os.path.join(here, "shim"), os.path.dirname(here))]
    init = next(path for path in inits if os.path.isfile(path))  # beside us, or around us where a wheel put us
    found, name = util.find_spec("shim"), "shim"
    if not found or os.path.realpath(found.origin or "") != init:
        name = "_mlx_lm_shim"  # a program may have a module "shim" of its own: it keeps the name
        sys.modules[name] = module = util.module_from_spec(util.spec_from_file_location(name, init))
        module.__loader__.exec_module(module)
    import_module(name + ".boot").start()


if sys.version_info >= (3, 11) and os.environ.get("MLX_SHIM", "").strip().lower() not in ("0", "off", "false", "no"):
    if "MlxLmShimFinder" not in [type(finder).__name__ for finder in sys.meta_path]:
        sys.meta_path.insert(0, MlxLmShimFinder())
# What the sitecustomize we shadow raises, or that there is none, reaches Python as it would without us.
here = os.stat(os.path.dirname(__file__) or ".")[1:3]  # inode and device: the same folder by a link is no other one
ours = [(i, p) for i, p in enumerate(sys.path) if os.path.exists(p) and os.stat(p)[1:3] == here]
sys.path[:] = others = [p for p in sys.path if p not in dict(ours).values()]
this = sys.modules.pop("sitecustomize", None)  # held: Python 2 empties a module that nobody holds
try:
    import sitecustomize  # noqa: F401
finally:
    for i, p in ours:
        sys.path.insert(i + (sys.path.index(others[0]) if others and others[0] in sys.path else 0), p)
