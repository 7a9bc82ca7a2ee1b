//! Room for connections, and for the bodies that arrive over them. Where all of it is taken, one without a request in work gives
//! way to a newcomer: the one that has been so for longest. Whoever holds connections and asks nothing keeps nobody out, and a
//! request is in work when it has arrived whole.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
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
    /// Bytes of bodies that have not arrived whole, at most.
    most_arriving_bytes: usize,
    state: Mutex<State>,
    /// Somebody has left, or has nothing to do any more.
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    taken: usize,
    /// Bytes of bodies that have not arrived whole.
    arriving_bytes: usize,
    /// Those that have nothing in work, by the time since when and a number of their own.
    idle: BTreeMap<(Instant, u64), Idle>,
    /// Who was told to go for a newcomer and has not left: nobody else has to.
    leaving: Option<u64>,
    /// No more requests are taken.
    is_closed: bool,
    entered: u64,
}

/// A connection without a request in work.
#[derive(Debug)]
struct Idle {
    /// How to tell it to go.
    told: Arc<Notify>,
    /// Whether the body of a request is on its way.
    is_arriving: bool,
}

impl Room {
    pub(super) fn new(most: usize, most_arriving_bytes: usize) -> Arc<Room> {
        let (state, changed) = (Mutex::default(), Notify::new());
        Arc::new(Room { most: most.max(1), most_arriving_bytes, state, changed })
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
                        arriving_bytes: AtomicUsize::new(0),
                    };
                    place.rest(&mut state, false);
                    return Arc::new(place);
                }
                let oldest = state.idle.keys().next().map(|(since, _)| *since + FIRST_WORDS);
                if state.leaving.is_some() {
                    None
                } else if oldest.is_some_and(|time| time <= Instant::now())
                    && let Some(((_, number), idle)) = state.idle.pop_first()
                {
                    idle.told.notify_one();
                    state.leaving = Some(number);
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

    /// Tells those to go whose requests have not arrived: no more are taken.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.is_closed = true;
        state.idle.extract_if(.., |_, idle| idle.is_arriving).for_each(|(_, idle)| idle.told.notify_one());
    }

    /// Where bodies that have begun take too much together, the one that is on its way for longest gives way; when it has left, the
    /// next, if that was not enough.
    fn bound_bodies(&self, state: &mut State) {
        if state.arriving_bytes <= self.most_arriving_bytes || state.leaving.is_some() {
            return;
        }
        let oldest = state.idle.iter().find(|(_, idle)| idle.is_arriving).map(|(key, _)| *key);
        if let Some((key, idle)) = oldest.and_then(|key| state.idle.remove_entry(&key)) {
            idle.told.notify_one();
            state.leaving = Some(key.1);
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
    /// Bytes of a body that has not arrived whole.
    arriving_bytes: AtomicUsize,
}

impl Place {
    /// Waits until it has to be given up.
    pub(super) async fn is_needed(&self) {
        self.told.notified().await;
    }

    /// A request of the connection has begun, and is in work until what this gives is dropped: at once, or, where it has a body,
    /// when [`Place::arrived`] says so.
    pub(super) fn work(self: &Arc<Place>, has_body: bool) -> Work {
        let mut state = self.room.state();
        self.stir(&mut state);
        if has_body {
            self.rest(&mut state, true);
        }
        Work(Arc::clone(self))
    }

    /// The body of the request is here.
    pub(super) fn arrived(&self) {
        let mut state = self.room.state();
        self.stir(&mut state);
        self.forget_body(&mut state);
    }

    /// Some bytes of the request's body are here.
    fn has_received(&self, bytes: usize) {
        let mut state = self.room.state();
        self.arriving_bytes.fetch_add(bytes, Relaxed);
        state.arriving_bytes += bytes;
        self.room.bound_bodies(&mut state);
    }

    fn forget_body(&self, state: &mut State) {
        state.arriving_bytes -= self.arriving_bytes.swap(0, Relaxed);
    }

    /// Some of an answer has left: whoever reads one, to its last byte, is not who has done nothing for longest.
    pub(super) fn touch(&self) {
        let mut state = self.room.state();
        let since = *self.idle_since.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(idle) = since.and_then(|since| state.idle.remove(&(since, self.number))) {
            self.rest(&mut state, idle.is_arriving);
        }
    }

    fn rest(&self, state: &mut State, is_arriving: bool) {
        if state.is_closed && is_arriving {
            self.told.notify_one();
        }
        let now = Instant::now();
        *self.idle_since.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        state.idle.insert((now, self.number), Idle { told: Arc::clone(&self.told), is_arriving });
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
        self.forget_body(&mut state);
        state.taken -= 1;
        state.leaving = state.leaving.filter(|leaving| *leaving != self.number);
        // Others may have come in while this one left, and nothing more of them may come.
        self.room.bound_bodies(&mut state);
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
        let mut state = place.room.state();
        place.stir(&mut state);
        place.forget_body(&mut state);
        place.rest(&mut state, false);
        place.room.changed.notify_one();
    }
}

/// The body of a request on its way.
pub(super) struct Arriving<B> {
    body: B,
    place: Arc<Place>,
}

impl<B> Arriving<B> {
    pub(super) fn new(body: B, place: Arc<Place>) -> Arriving<B> {
        Arriving { body, place }
    }
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for Arriving<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            self.place.has_received(frame.data_ref().map_or(0, Bytes::len));
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
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
        let room = Room::new(3, 1 << 20);
        let places = [room.enter().await, room.enter().await, room.enter().await];
        let work = places[0].work(false);
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
        // A request that has not arrived is not in work.
        let _arriving = last.work(true);
        tokio::time::advance(FIRST_WORDS).await;
        room.close();
        assert!(is_ready(last.is_needed()).await && !is_ready(fourth.is_needed()).await);
        last.arrived();
        drop((_arriving, first, last, fourth));
        assert_eq!(room.state().taken, 0);
        assert!(room.state().idle.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_body_that_is_on_its_way_for_longest_gives_way_where_all_take_too_much() {
        let room = Room::new(9, 1000);
        let places = [room.enter().await, room.enter().await, room.enter().await];
        let work = places.each_ref().map(|place| place.work(true));
        places[0].has_received(600);
        places[0].arrived();
        tokio::time::advance(FIRST_WORDS).await;
        places[1].has_received(600);
        assert!(!is_ready(places[1].is_needed()).await, "what has arrived whole is in work");
        places[2].has_received(600);
        assert!(is_ready(places[1].is_needed()).await && !is_ready(places[2].is_needed()).await);
        drop((work, places));
        assert_eq!(room.state().arriving_bytes, 0);

        // All of them come in before the first has left.
        let [one, other, last] = [room.enter().await, room.enter().await, room.enter().await];
        let work = [&one, &other, &last].map(|place| place.work(true));
        [&one, &other, &last].into_iter().for_each(|place| place.has_received(900));
        assert!(is_ready(one.is_needed()).await && !is_ready(other.is_needed()).await);
        let [of_one, of_other, of_last] = work;
        drop((of_one, one));
        assert!(is_ready(other.is_needed()).await && !is_ready(last.is_needed()).await);
        drop((of_other, other));
        assert!(!is_ready(last.is_needed()).await, "there is room for one");
        drop((of_last, last));
        assert_eq!(room.state().taken, 0);
    }
}
