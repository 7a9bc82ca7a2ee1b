//! Reads and writes by threads that wait for the disk, where the kernel permits no `io_uring`.
//!
//! A thread ends when the queue is gone. Nobody waits for it: a disk that never answers would keep them all.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use crate::layer::Layer;
use crate::queue::{Request, Way};

/// A few threads with one list of requests.
pub(crate) struct Threads {
    requests: Sender<Request>,
}

impl Threads {
    pub(crate) fn start(count: usize, layer: Arc<dyn Layer>) -> Threads {
        let (requests, list) = channel::<Request>();
        let list = Arc::new(Mutex::new(list));
        for _ in 0..count {
            let (list, layer) = (Arc::clone(&list), Arc::clone(&layer));
            std::thread::spawn(move || work(&list, layer.as_ref()));
        }
        Threads { requests }
    }

    pub(crate) fn submit(&self, request: Request) {
        if let Err(refused) = self.requests.send(request) {
            let request = refused.0;
            request.end(Err(libc::EIO));
        }
    }
}

fn work(list: &Mutex<Receiver<Request>>, layer: &dyn Layer) {
    loop {
        let next = list.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(request) = next else { return };
        let outcome = transfer(&request, layer);
        request.end(outcome);
    }
}

/// Moves all bytes of a request.
pub(crate) fn transfer(request: &Request, layer: &dyn Layer) -> Result<(), i32> {
    let mut done = 0;
    while !request.is_through(done) {
        let Request { address, length, offset, .. } = request.rest(done);
        // SAFETY: the operation that made the request owns the memory, and gives it to nobody else until the request ends.
        let moved = unsafe {
            match request.way {
                Way::Read => {
                    let bytes = std::slice::from_raw_parts_mut(address as *mut u8, length);
                    layer.read_at(request.file.file(), bytes, offset)
                }
                Way::Write => {
                    let bytes = std::slice::from_raw_parts(address as *const u8, length);
                    layer.write_at(request.file.file(), bytes, offset)
                }
            }
        };
        match moved {
            Ok(0) => return Err(libc::EIO),
            Ok(moved) => done += moved,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
    Ok(())
}
