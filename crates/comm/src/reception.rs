//! A listener that strangers cannot wear out.
//!
//! Every connection begins as a stranger's. It has a few seconds, all in all, to prove itself, in a thread of its own, and
//! there is room for a bounded number at a time. When the room is full, newcomers wait in the kernel's queue until the
//! stranger who has been there longest has had a fair moment; then it is shown out. A member proves itself within
//! milliseconds and, should it be shown out in a crowd, calls again. When the process has no descriptor left the
//! listener pauses instead of spinning.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a connection may take to prove itself and say what it wants, however slowly its bytes come.
const PROOF_LIMIT: Duration = Duration::from_secs(5);
/// Strangers at a time, each with a thread and a descriptor.
const MAX_STRANGERS: usize = 128;
/// How long a stranger may stay when others wait.
const FAIR_STAY: Duration = Duration::from_millis(100);
/// How long to wait when the system will not give a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// An open listener; see the module.
pub(crate) struct Reception {
    room: Arc<Room>,
    address: SocketAddr,
}

#[derive(Default)]
struct Room {
    strangers: Mutex<VecDeque<Stranger>>,
    somebody_went: Condvar,
    closed: AtomicBool,
}

struct Stranger {
    since: Instant,
    stream: Arc<TcpStream>,
}

/// A connection that has not proven itself.
pub(crate) struct Guest {
    pub(crate) stream: Arc<TcpStream>,
    /// By when it must have proven itself.
    pub(crate) deadline: Instant,
    room: Arc<Room>,
}

impl Guest {
    /// It has proven itself, or is turned away: its place in the room is free.
    pub(crate) fn leave_room(self) -> Arc<TcpStream> {
        Arc::clone(&self.stream)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.room.lock().retain(|stranger| !Arc::ptr_eq(&stranger.stream, &self.stream));
        self.room.somebody_went.notify_all();
    }
}

impl Reception {
    /// Hands every connection to `receive`, each in a thread of its own, until closed.
    pub(crate) fn open(
        listener: TcpListener,
        receive: impl Fn(Guest) + Send + Sync + 'static,
    ) -> std::io::Result<Reception> {
        let address = listener.local_addr()?;
        let room = Arc::new(Room::default());
        let receiving = Arc::clone(&room);
        let accept = move || receiving.accept(&listener, &Arc::new(receive));
        std::thread::Builder::new().name("comm-accept".into()).spawn(accept)?;
        Ok(Reception { room, address })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until nobody is in the room, or until `limit`.
    pub(crate) fn wait_until_empty(&self, limit: Duration) {
        let occupied = |strangers: &mut VecDeque<Stranger>| !strangers.is_empty();
        drop(self.room.somebody_went.wait_timeout_while(self.room.lock(), limit, occupied));
    }

    /// Gives the port back; who is in stays in.
    pub(crate) fn close(&self) {
        if self.room.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        // The accepting thread wakes up, sees the mark and drops the listener.
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(Ipv4Addr::LOCALHOST.into());
        }
        let _ = TcpStream::connect_timeout(&address, Duration::from_secs(1));
    }
}

impl Drop for Reception {
    fn drop(&mut self) {
        self.close();
    }
}

impl Room {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Stranger>> {
        self.strangers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept<R: Fn(Guest) + Send + Sync + 'static>(
        self: &Arc<Self>,
        listener: &TcpListener,
        receive: &Arc<R>,
    ) {
        loop {
            let accepted = listener.accept();
            if self.closed.load(Ordering::SeqCst) {
                return;
            }
            let Ok((stream, _)) = accepted else {
                // Usually no descriptor is left, and a stranger holds one.
                self.show_out_oldest(&mut self.lock());
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            };
            let stream = Arc::new(stream);
            let now = Instant::now();
            self.make_room().push_back(Stranger { since: now, stream: Arc::clone(&stream) });
            let guest = Guest { stream, deadline: now + PROOF_LIMIT, room: Arc::clone(self) };
            let receive = Arc::clone(receive);
            let spawned =
                std::thread::Builder::new().name("comm-receive".into()).spawn(move || receive(guest));
            if spawned.is_err() {
                // The connection is dropped, and a member calls again.
                std::thread::sleep(ACCEPT_PAUSE);
            }
        }
    }

    /// Waits until there is a place.
    fn make_room(&self) -> MutexGuard<'_, VecDeque<Stranger>> {
        let mut strangers = self.lock();
        while strangers.len() >= MAX_STRANGERS && !self.closed.load(Ordering::SeqCst) {
            let stay = strangers.front().map_or(FAIR_STAY, |oldest| oldest.since.elapsed());
            if stay >= FAIR_STAY {
                self.show_out_oldest(&mut strangers);
            } else {
                let waited = self.somebody_went.wait_timeout(strangers, FAIR_STAY - stay);
                strangers = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        strangers
    }

    fn show_out_oldest(&self, strangers: &mut VecDeque<Stranger>) {
        if let Some(oldest) = strangers.pop_front() {
            // Its thread wakes up with an error and ends; a connection that is already broken needs no more.
            let _ = oldest.stream.shutdown(Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    fn parrot() -> Reception {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        Reception::open(listener, |guest| {
            let mut byte = [0u8];
            let heard = guest.stream.set_read_timeout(Some(PROOF_LIMIT));
            if heard.and_then(|()| (&*guest.stream).read_exact(&mut byte)).is_ok() {
                let _ = (&*guest.leave_room()).write_all(&byte);
            }
        })
        .unwrap()
    }

    /// Calls, again where it was shown out, until it is answered.
    fn call(address: SocketAddr, limit: Instant) {
        loop {
            assert!(Instant::now() < limit, "never answered");
            let attempt = || -> std::io::Result<()> {
                let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(2))?;
                stream.set_read_timeout(Some(Duration::from_secs(2)))?;
                stream.write_all(b"x")?;
                stream.read_exact(&mut [0u8])
            };
            if attempt().is_ok() {
                return;
            }
        }
    }

    #[test]
    fn silent_strangers_in_any_number_do_not_keep_a_member_out() {
        let reception = parrot();
        let address = reception.address();
        let limit = Instant::now() + Duration::from_secs(20);
        let strangers: Vec<TcpStream> = (0..400)
            .map_while(|_| TcpStream::connect_timeout(&address, Duration::from_secs(5)).ok())
            .collect();
        assert!(strangers.len() > 2 * MAX_STRANGERS, "{}", strangers.len());
        assert!(reception.room.lock().len() <= MAX_STRANGERS);
        call(address, limit);
    }

    #[test]
    fn a_closed_reception_gives_its_port_back() {
        let reception = parrot();
        let address = reception.address();
        call(address, Instant::now() + Duration::from_secs(5));
        reception.close();
        let limit = Instant::now() + Duration::from_secs(5);
        while TcpListener::bind(address).is_err() {
            assert!(Instant::now() < limit, "the port is still taken");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}
