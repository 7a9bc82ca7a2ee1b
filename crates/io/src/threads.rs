//! Reads and writes by threads that wait for the disk, where the kernel permits no `io_uring`.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::queue::{Request, Way};

/// A few threads with one list of requests.
pub(crate) struct Threads {
    requests: Option<Sender<Request>>,
    workers: Vec<JoinHandle<()>>,
}

impl Threads {
    pub(crate) fn start(count: usize) -> Threads {
        let (requests, list) = channel::<Request>();
        let list = Arc::new(Mutex::new(list));
        let workers = (0..count).map(|_| {
            let list = Arc::clone(&list);
            std::thread::spawn(move || work(&list))
        });
        Threads { requests: Some(requests), workers: workers.collect() }
    }

    pub(crate) fn submit(&self, request: Request) {
        let refused = match &self.requests {
            Some(requests) => requests.send(request).err().map(|error| error.0),
            None => Some(request),
        };
        if let Some(request) = refused {
            request.done.clone().end(&request, Err(libc::EIO));
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.requests = None;
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

fn work(list: &Mutex<Receiver<Request>>) {
    loop {
        let next = list.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(request) = next else { return };
        let outcome = transfer(&request);
        request.done.end(&request, outcome);
    }
}

/// Moves all bytes of a request.
pub(crate) fn transfer(request: &Request) -> Result<(), i32> {
    let mut done = 0;
    while done < request.length {
        let rest = request.rest(done);
        let (file, length, offset) = (rest.file, rest.length, rest.offset as libc::off_t);
        // SAFETY: the operation that made the request owns the memory and keeps the file open until the request ends.
        let moved = unsafe {
            match request.way {
                Way::Read => libc::pread(file, rest.address as *mut libc::c_void, length, offset),
                Way::Write => libc::pwrite(file, rest.address as *const libc::c_void, length, offset),
            }
        };
        match moved {
            0 => return Err(libc::EIO),
            1.. => done += moved as usize,
            _ => match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                code => return Err(code.unwrap_or(libc::EIO)),
            },
        }
    }
    Ok(())
}
