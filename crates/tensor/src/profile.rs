//! What ops cost, counted where they run: multiply-accumulates, floating-point operations, bytes and time, per module and per
//! pass.
//!
//! A thread counts while [`collect`] runs on it; else an op pays for a few relaxed loads. An op with a parameter belongs to the
//! module that the parameter's name says, any other to the innermost [`scope`] around it. Backward belongs to the module whose
//! forward recorded it. Forward, backward and what backward computes again are apart, whoever asked for them.
//!
//! Counts are those of the mathematics: a causal mask, a window or zeros spare nothing. A product of `m·k` by `k·n` is `m·k·n`
//! multiply-accumulates of two operations each. A layer norm is 5 operations per element (4 without weight), an RMS norm one
//! less; an activation, a softmax and a pooled input are one. The gradient of each of these is twice that. Sums, elementwise
//! arithmetic, lookups, dropout and losses count nothing, as in DeepSpeed's profiler.
//!
//! Bytes are those of the operands that an op borrows and of the results that it makes, each once: what passes between memory
//! and cores at least. What a kernel reads again, and scratch of its own, is not in them. Times are those of the device's own
//! clock where it has one ([`crate::backend::Work::mark`]), so that nobody waits for it; else those of the host.
//!
//! ```
//! use ferrospeed_tensor::{DType, Tensor, ops, profile};
//!
//! # fn main() -> ferrospeed_tensor::Result<()> {
//! let device = ferrospeed_cpu::device();
//! let (a, b) = (Tensor::zeros([2, 3], DType::F32, &device)?, Tensor::zeros([3, 5], DType::F32, &device)?);
//! let (product, profile) = profile::collect(&device, || ops::matmul(&a, &b));
//! product?;
//! assert_eq!(profile.total().forward.macs, 30);
//! # Ok(())
//! # }
//! ```

mod counts;
mod marks;
mod segments;

pub use counts::{ModuleWork, Passes, Profile, Work};
pub use segments::Segment;

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::backend::Device;
use crate::param::{Operand, Param};
use marks::Marks;
use segments::Segments;

/// Why an op runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    Forward,
    Backward,
    Recomputation,
}

/// Where work belongs.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    path: Arc<str>,
    /// Whether parameters read inside do not make modules of their own.
    sealed: bool,
}

struct Collector {
    device: Device,
    profile: Profile,
    stack: Vec<Place>,
    pass: Pass,
    since: Instant,
    /// Where only the times are wanted, and nobody waits for the device.
    segments: Option<Segments>,
    /// Where the device has a clock of its own.
    marks: Option<Marks>,
}

impl Collector {
    fn innermost(&mut self) -> &mut Passes {
        let path = &self.stack.last().expect("the root is never popped").path;
        &mut self.profile.module(path).own
    }

    /// Gives the time since the last change of module or pass to the module and the pass that had it.
    fn settle(&mut self) {
        if let Some(segments) = &mut self.segments {
            let now = Instant::now();
            let path = &self.stack.last().expect("the root is never popped").path;
            segments.add(path, self.pass, self.since, now);
            self.since = now;
            return;
        }
        if let Some(marks) = &mut self.marks {
            let path = self.stack.last().expect("the root is never popped").path.clone();
            marks.end(path, self.pass, &mut self.profile);
            return;
        }
        // A failing device tells the op that waits for it; here it would only spoil a time.
        let _ = self.device.backend().synchronize();
        let (spent, pass) = (self.since.elapsed(), self.pass);
        self.innermost().of(pass).time += spent;
        self.since = Instant::now();
    }
}

/// How many threads collect: what every op looks at first.
static COLLECTING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static COLLECTOR: RefCell<Option<Collector>> = const { RefCell::new(None) };
}

/// Does something to this thread's collector, where there is one.
#[inline]
fn with<R>(act: impl FnOnce(&mut Collector) -> R) -> Option<R> {
    if COLLECTING.load(Ordering::Relaxed) == 0 {
        return None;
    }
    COLLECTOR.with_borrow_mut(|collector| collector.as_mut().map(act))
}

/// Runs `work` and says what it did on this thread. Times are those of the work and not of its submission: the device's own,
/// which is waited for when all is done. Within another `collect`, the inner one alone counts.
pub fn collect<R>(device: &Device, work: impl FnOnce() -> R) -> (R, Profile) {
    let _ = device.backend().synchronize();
    let (result, collector) = collect_into(device, None, Marks::begin(device), work);
    let profile = collector.map(|mut collector| {
        if let Some(mut marks) = collector.marks.take() {
            marks.settle(&mut collector.profile);
        }
        collector.profile
    });
    (result, profile.unwrap_or_default())
}

/// Runs `work` and says when it was in which block, as the host saw it: nobody waits for the device. At most so many
/// stretches are kept.
pub fn timeline<R>(device: &Device, most: usize, work: impl FnOnce() -> R) -> (R, Vec<Segment>) {
    let (result, collector) = collect_into(device, Some(Segments::new(most)), None, work);
    let segments = collector.and_then(|collector| collector.segments);
    (result, segments.map(Segments::named).unwrap_or_default())
}

fn collect_into<R>(
    device: &Device,
    segments: Option<Segments>,
    marks: Option<Marks>,
    work: impl FnOnce() -> R,
) -> (R, Option<Collector>) {
    struct Restore(Option<Collector>);
    impl Drop for Restore {
        fn drop(&mut self) {
            COLLECTOR.set(self.0.take());
            COLLECTING.fetch_sub(1, Ordering::Relaxed);
        }
    }
    let root = Place { path: "".into(), sealed: false };
    let collector = Collector {
        device: device.clone(),
        profile: Profile::default(),
        stack: vec![root],
        pass: Pass::Forward,
        since: Instant::now(),
        segments,
        marks,
    };
    COLLECTING.fetch_add(1, Ordering::Relaxed);
    let _restore = Restore(COLLECTOR.replace(Some(collector)));
    let result = work();
    with(Collector::settle);
    (result, COLLECTOR.take())
}

/// Counts work of the innermost module.
#[inline]
pub(crate) fn count(macs: usize, flops: usize) {
    with(|collector| {
        let pass = collector.pass;
        *collector.innermost().of(pass) +=
            Work { macs: macs as u64, flops: flops as u64, bytes: 0, time: Duration::ZERO };
    });
}

/// Counts bytes that the innermost module reads or writes.
#[inline]
pub(crate) fn count_bytes(bytes: usize) {
    with(|collector| {
        let pass = collector.pass;
        collector.innermost().of(pass).bytes += bytes as u64;
    });
}

/// Counts a product.
#[inline]
pub fn count_product(batch: usize, m: usize, n: usize, k: usize) {
    let macs = batch * m * n * k;
    count(macs, 2 * macs);
}

/// Leaves a module or a pass again, also by an error.
enum Leave {
    Module,
    Pass { before: Pass },
}

impl Drop for Leave {
    fn drop(&mut self) {
        with(|collector| {
            collector.settle();
            match self {
                Leave::Module => drop(collector.stack.pop()),
                Leave::Pass { before } => collector.pass = *before,
            }
        });
    }
}

/// Counts what `work` does as a pass of its own.
pub(crate) fn during<R>(pass: Pass, work: impl FnOnce() -> R) -> R {
    let _leave = with(|collector| {
        collector.settle();
        Leave::Pass { before: std::mem::replace(&mut collector.pass, pass) }
    });
    work()
}

/// Counts what `work` does as backward's: of an op that takes its gradients in forward.
pub fn taking_gradients<R>(work: impl FnOnce() -> R) -> R {
    during(Pass::Backward, work)
}

/// Where ops now belong; `None` where nobody counts.
pub(crate) fn current() -> Option<Place> {
    with(|collector| collector.stack.last().expect("the root is never popped").clone())
}

/// Runs `work` at a place that [`current`] gave earlier.
pub(crate) fn within<R>(place: Option<&Place>, work: impl FnOnce() -> R) -> R {
    let _leave = place.and_then(|place| enter(|| Some(place.clone()), None, String::new));
    work()
}

/// Enters the module that `place` gives; the result leaves it when it is dropped.
fn enter(
    place: impl FnOnce() -> Option<Place>,
    class: Option<&'static str>,
    sizes: impl FnOnce() -> String,
) -> Option<Leave> {
    with(|collector| {
        if collector.stack.last().is_some_and(|frame| frame.sealed) {
            return None;
        }
        let place = place()?;
        collector.settle();
        let module = collector.profile.module(&place.path);
        module.class = module.class.or(class);
        if module.sizes.is_empty() {
            module.sizes = sizes();
        }
        collector.stack.push(place);
        Some(Leave::Module)
    })
    .flatten()
}

fn module_of(param: &Param) -> &str {
    param.name().rsplit_once('.').map_or("", |(module, _)| module)
}

/// Runs `work` in the module of the parameter that `operand` is; where it is none, in the module around.
pub(crate) fn in_module_of<R>(
    operand: Option<&Operand>,
    class: &'static str,
    sizes: impl FnOnce() -> String,
    work: impl FnOnce() -> R,
) -> R {
    let place = || match operand {
        Some(Operand::Param(param)) => Some(Place { path: module_of(param).into(), sealed: false }),
        _ => None,
    };
    let _leave = enter(place, Some(class), sizes);
    work()
}

/// Runs `work` in the module that `params` have in common: `h.0.attn` of `h.0.attn.query.weight` and `h.0.attn.out.weight`.
pub fn scope<'a, R>(
    class: &'static str,
    params: impl IntoIterator<Item = &'a Param>,
    work: impl FnOnce() -> R,
) -> R {
    let common = || {
        let mut modules = params.into_iter().map(module_of);
        let first: Vec<&str> = modules.next()?.split('.').collect();
        let shared = modules.fold(first.len(), |shared, module| {
            first[..shared].iter().zip(module.split('.')).take_while(|(a, b)| *a == b).count()
        });
        Some(Place { path: first[..shared].join(".").into(), sealed: false })
    };
    let _leave = enter(common, Some(class), String::new);
    work()
}

/// Runs `work` in the module at `path`, which has no parameters of its own to be known by.
pub fn scope_at<R>(path: &str, class: &'static str, work: impl FnOnce() -> R) -> R {
    let _leave = enter(|| Some(Place { path: path.into(), sealed: false }), Some(class), String::new);
    work()
}

/// The same for the module number `index` below the innermost one.
pub fn scope_below<R>(index: usize, class: &'static str, work: impl FnOnce() -> R) -> R {
    let _leave = current().and_then(|around| {
        let path = match &*around.path {
            "" => index.to_string(),
            path => format!("{path}.{index}"),
        };
        enter(|| Some(Place { path: path.into(), sealed: false }), Some(class), String::new)
    });
    work()
}

/// The same for a module that works with the parameters of others, as a head tied to an embedding: all that `work` does is its.
pub fn scope_of_tied<R>(
    path: &str,
    class: &'static str,
    sizes: impl FnOnce() -> String,
    work: impl FnOnce() -> R,
) -> R {
    let _leave = enter(|| Some(Place { path: path.into(), sealed: true }), Some(class), sizes);
    work()
}
