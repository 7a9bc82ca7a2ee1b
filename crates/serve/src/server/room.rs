//! Room for connections. Where all of it is taken, one without a request in work gives way to a newcomer: the one that has been so
//! for longest. Whoever holds connections and asks nothing keeps nobody out.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::response::Response;
use hyper::body::{Frame, SizeHint};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// A request that was sent at once is read within this, however many others are: before it, nobody gives way.
const FIRST_WORDS: Duration = Duration::from_secs(1);

/// The room of a server.
#[derive(Debug)]
pub(super) struct Room {
    most: usize,
    state: Mutex<State>,
    /// Somebody has left, or has nothing to do any more.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    /// Those that have nothing in work, by the time since when and a number of their own, and how to tell them to go.
    idle: BTreeMap<(Instant, u64), Arc<Notify>>,
    entered: u64,
}

impl Room {
    pub(super) fn new(most: usize) -> Arc<Room> {
        Arc::new(Room { most: most.max(1), state: Mutex::default(), changed: Notify::new() })
    }

    /// A place, as soon as there is one.
    pub(super) async fn enter(self: &Arc<Room>) -> Arc<Place> {
        loop {
            let oldest = {
                let mut state = self.state();
                if state.taken < self.most {
                    state.taken += 1;
                    state.entered += 1;
                    let place = Place {
                        number: state.entered,
                        room: Arc::clone(self),
                        told: Arc::default(),
                        idle_since: Mutex::default(),
                    };
                    place.rest(&mut state);
                    return Arc::new(place);
                }
                let oldest = state.idle.keys().next().map(|(since, _)| *since + FIRST_WORDS);
                if oldest.is_some_and(|time| time <= Instant::now())
                    && let Some((_, told)) = state.idle.pop_first()
                {
                    told.notify_one();
                    // It leaves when it hears that.
                    None
                } else {
                    oldest
                }
            };
            match oldest {
                Some(time) => {
                    tokio::select! { () = self.changed.notified() => {}, () = sleep_until(time) => {} }
                }
                None => self.changed.notified().await,
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that is done under the lock can be left half done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of one connection, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    number: u64,
    room: Arc<Room>,
    told: Arc<Notify>,
    idle_since: Mutex<Option<Instant>>,
}

impl Place {
    /// Waits until it has to be given up.
    pub(super) async fn is_needed(&self) {
        self.told.notified().await;
    }

    /// A request of the connection is in work until what this gives is dropped.
    pub(super) fn work(self: &Arc<Place>) -> Work {
        let mut state = self.room.state();
        self.stir(&mut state);
        Work(Arc::clone(self))
    }

    fn rest(&self, state: &mut State) {
        let now = Instant::now();
        *self.idle_since.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        state.idle.insert((now, self.number), Arc::clone(&self.told));
    }

    fn stir(&self, state: &mut State) {
        let since = self.idle_since.lock().unwrap_or_else(PoisonError::into_inner).take();
        since.and_then(|since| state.idle.remove(&(since, self.number)));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.room.state();
        self.stir(&mut state);
        state.taken -= 1;
        self.room.changed.notify_one();
    }
}

/// A request in work.
#[derive(Debug)]
pub(super) struct Work(Arc<Place>);

impl Work {
    /// The answer, to whose last byte the request is in work.
    pub(super) fn until_sent(self, answer: Response) -> Response {
        answer.map(|body| Body::new(Answer { body, _work: self }))
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let place = &self.0;
        place.rest(&mut place.room.state());
        place.room.changed.notify_one();
    }
}

struct Answer {
    body: Body,
    _work: Work,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a future is ready when all others have had their turn.
    async fn is_ready<T>(future: impl Future<Output = T>) -> bool {
        tokio::time::timeout(Duration::from_millis(1), future).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_been_idle_for_longest_gives_way_and_who_works_does_not() {
        let room = Room::new(3);
        let places = [room.enter().await, room.enter().await, room.enter().await];
        let work = places[0].work();
        assert!(!is_ready(room.enter()).await, "nobody gives way before they had time for a first word");
        tokio::time::advance(FIRST_WORDS).await;
        assert!(!is_ready(room.enter()).await, "the place is not free before its holder has left");
        assert!(is_ready(places[1].is_needed()).await);
        assert!(!is_ready(places[0].is_needed()).await && !is_ready(places[2].is_needed()).await);
        let [first, second, third] = places;
        drop(second);
        let newcomer = room.enter().await;
        let waiting = {
            let room = Arc::clone(&room);
            tokio::spawn(async move { room.enter().await })
        };
        assert!(is_ready(third.is_needed()).await);
        drop((third, newcomer));
        let last = waiting.await.unwrap();
        drop(work);
        tokio::time::advance(FIRST_WORDS).await;
        let fourth = room.enter().await;
        assert!(
            !is_ready(room.enter()).await && is_ready(first.is_needed()).await,
            "its request was answered"
        );
        drop((first, last, fourth));
        assert_eq!(room.state().taken, 0);
        assert!(room.state().idle.is_empty());
    }
}
