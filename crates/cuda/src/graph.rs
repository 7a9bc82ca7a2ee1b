//! Recorded work as CUDA graphs.
//!
//! The stream captures what is submitted; memory taken meanwhile belongs to the graph until it is forgotten, so that a
//! replay finds its intermediate results' places free. A copy from or to the host has no meaning in a replay: it ends the
//! recording, and the work is left to run as it always did. So it is everywhere with `FERROSPEED_CUDA_GRAPHS=0`.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::result as cu;
use cudarc::driver::sys;
use ferrospeed_tensor::{Result, TensorError};

use crate::CudaBackend;
use crate::driver::{Checked, Driver, failed};
use crate::memory::{Arena, DevicePool};

const OP: &str = "record work";

/// The graphs of one device.
pub(crate) struct Graphs {
    wanted: bool,
    ready: Mutex<Ready>,
    recording: AtomicBool,
    refused: AtomicBool,
}

#[derive(Default)]
struct Ready {
    next: u64,
    graphs: HashMap<u64, Graph>,
}

struct Graph {
    executable: sys::CUgraphExec,
    memory: Arena,
}

// SAFETY: an executable graph may be launched from any thread; the map is behind a mutex.
unsafe impl Send for Graph {}

impl Graphs {
    pub(crate) fn new() -> Graphs {
        let wanted = std::env::var("FERROSPEED_CUDA_GRAPHS").map_or(true, |value| value != "0");
        let (recording, refused) = (AtomicBool::new(false), AtomicBool::new(false));
        Graphs { wanted, ready: Mutex::default(), recording, refused }
    }

    /// An error while work is being recorded: it needs the host.
    pub(crate) fn expect_not_recording(&self) -> Result<()> {
        if !self.recording.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.refused.store(true, Ordering::Relaxed);
        let why = "copies between host and device cannot be replayed".into();
        Err(TensorError::Unsupported { op: OP, device: "cuda".into(), why })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Ready> {
        self.ready.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Gives up every graph, when the device goes.
    pub(crate) fn clear(&self, driver: &Driver, pool: &DevicePool) {
        self.lock().graphs.drain().for_each(|(_, graph)| destroy(driver, pool, graph));
    }
}

pub(crate) fn record(backend: &CudaBackend, work: &mut dyn FnMut() -> Result<()>) -> Result<Option<u64>> {
    let (driver, graphs) = (&backend.driver, &backend.graphs);
    if !graphs.wanted {
        return Ok(None);
    }
    graphs.expect_not_recording()?;
    driver.bind()?;
    let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream is ours, and nothing is being captured on it.
    unsafe { cu::stream::begin_capture(driver.stream(), mode) }.during(OP)?;
    backend.pool.begin_recording();
    graphs.refused.store(false, Ordering::Relaxed);
    graphs.recording.store(true, Ordering::Relaxed);
    let done = work();
    graphs.recording.store(false, Ordering::Relaxed);
    // SAFETY: as above; this ends the capture whether it is still valid or not.
    let captured = unsafe { cu::stream::end_capture(driver.stream()) }.during(OP);
    let memory = backend.pool.end_recording(driver);
    let executable = finish(done, captured);
    match executable {
        Ok(executable) if memory.is_free() => {
            let mut ready = graphs.lock();
            ready.next += 1;
            let number = ready.next;
            ready.graphs.insert(number, Graph { executable, memory });
            Ok(Some(number))
        }
        Ok(executable) => {
            destroy(driver, &backend.pool, Graph { executable, memory });
            Err(failed(OP, "it left tensors alive that it had made"))
        }
        Err(error) => {
            backend.pool.end_arena(driver, memory);
            if graphs.refused.load(Ordering::Relaxed) { Ok(None) } else { Err(error) }
        }
    }
}

fn finish(done: Result<()>, captured: Result<sys::CUgraph>) -> Result<sys::CUgraphExec> {
    let graph = captured
        .and_then(|graph| if graph.is_null() { Err(failed(OP, "nothing came of it")) } else { Ok(graph) });
    // SAFETY: the graph is whole, and not used after it is destroyed; what runs is a copy.
    let executable = graph.and_then(|graph| unsafe {
        let executable = cu::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)).during(OP);
        let _ = cu::graph::destroy(graph);
        executable
    });
    match (done, executable) {
        (Ok(()), executable) => executable,
        (Err(error), Ok(executable)) => {
            // SAFETY: it was just made, and never launched.
            let _ = unsafe { cu::graph::exec_destroy(executable) };
            Err(error)
        }
        (Err(error), Err(_)) => Err(error),
    }
}

pub(crate) fn replay(backend: &CudaBackend, number: u64) -> Result<()> {
    backend.graphs.expect_not_recording()?;
    backend.driver.bind()?;
    let ready = backend.graphs.lock();
    let Some(graph) = ready.graphs.get(&number) else {
        return Err(failed("replay work", format!("there is no recording {number}")));
    };
    // SAFETY: the graph is whole and its memory is held with it.
    unsafe { cu::graph::launch(graph.executable, backend.driver.stream()) }.during("replay work")
}

pub(crate) fn forget(backend: &CudaBackend, number: u64) {
    let graph = backend.graphs.lock().graphs.remove(&number);
    if let Some(graph) = graph {
        destroy(&backend.driver, &backend.pool, graph);
    }
}

fn destroy(driver: &Driver, pool: &DevicePool, graph: Graph) {
    if driver.synchronize().is_ok() {
        // SAFETY: no replay is under way, and none can follow.
        let _ = unsafe { cu::graph::exec_destroy(graph.executable) };
    }
    pool.end_arena(driver, graph.memory);
}
