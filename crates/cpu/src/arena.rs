//! Address space from which large host blocks are cut, and to which they return.
//!
//! A training step takes and gives back the same bytes in other sizes: activations go as gradients come. Free
//! neighbours therefore join, and the next block comes out of the smallest free range that holds it, so that what is
//! resident stays close to what was ever in use at once. Ranges are *warm*, their pages resident, or *cold*: never
//! touched, or given back to the system.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;

/// Regions start at, and cold ranges are whole numbers of, huge pages.
const PAGE_BYTES: usize = 2 << 20;
/// The first region reserves this much address space, not memory.
const REGION_BYTES: usize = 1 << 30;

/// Free ranges, by address and by size.
#[derive(Default)]
struct Ranges {
    by_address: BTreeMap<usize, usize>,
    by_size: BTreeSet<(usize, usize)>,
    bytes: usize,
}

impl Ranges {
    /// Adds a range, joined with its neighbours inside `region`.
    fn insert(&mut self, mut start: usize, mut length: usize, region: &Region) {
        if length == 0 {
            return;
        }
        let before = self.by_address.range(..start).next_back().map(|(&start, &length)| (start, length));
        if let Some((before, size)) = before
            && before + size == start
            && before >= region.start
        {
            self.remove(before, size);
            (start, length) = (before, size + length);
        }
        let end = start + length;
        if let Some(&size) = self.by_address.get(&end).filter(|_| end < region.end) {
            self.remove(end, size);
            length += size;
        }
        self.by_address.insert(start, length);
        self.by_size.insert((length, start));
        self.bytes += length;
    }

    fn remove(&mut self, start: usize, length: usize) {
        self.by_address.remove(&start);
        self.by_size.remove(&(length, start));
        self.bytes -= length;
    }

    /// The smallest range of at least `bytes`.
    fn fitting(&self, bytes: usize) -> Option<(usize, usize)> {
        self.by_size.range((bytes, 0)..).next().map(|&(length, start)| (start, length))
    }

    fn largest(&self) -> Option<(usize, usize)> {
        self.by_size.last().map(|&(length, start)| (start, length))
    }
}

/// A stretch of reserved address space.
#[derive(Clone, Copy)]
struct Region {
    start: usize,
    end: usize,
    reservation: system::Reservation,
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Arena {
    regions: Vec<Region>,
    warm: Ranges,
    cold: Ranges,
}

impl Arena {
    /// A block of exactly `bytes`, a multiple of what blocks are aligned to; `None` when the system refuses.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<NonNull<u8>> {
        if let Some((start, length)) = self.warm.fitting(bytes) {
            self.warm.remove(start, length);
            let region = self.region_of(start);
            self.warm.insert(start + bytes, length - bytes, &region);
            return NonNull::new(start as *mut u8);
        }
        if self.cold.fitting(bytes).is_none() {
            self.reserve(bytes)?;
        }
        let (start, length) = self.cold.fitting(bytes)?;
        self.cold.remove(start, length);
        let region = self.region_of(start);
        // A warm range that ends where the cold one starts comes first: its pages are there already.
        let before = self.warm.by_address.range(..start).next_back().map(|(&start, &length)| (start, length));
        let before = before.filter(|&(before, size)| before + size == start && before >= region.start);
        let (start, length) = match before {
            Some((before, size)) => {
                self.warm.remove(before, size);
                (before, size + length)
            }
            None => (start, length),
        };
        // The page that the block ends in becomes resident with it.
        let end = start + bytes;
        let touched = end.next_multiple_of(PAGE_BYTES).min(start + length);
        self.warm.insert(end, touched - end, &region);
        self.cold.insert(touched, start + length - touched, &region);
        NonNull::new(start as *mut u8)
    }

    /// Takes a block back.
    pub(crate) fn give(&mut self, block: NonNull<u8>, bytes: usize) {
        let start = block.as_ptr() as usize;
        let region = self.region_of(start);
        self.warm.insert(start, bytes, &region);
    }

    /// Bytes that are free and resident.
    pub(crate) fn warm_bytes(&self) -> usize {
        self.warm.bytes
    }

    /// Gives at least `bytes` of free memory back to the system, as far as whole pages are free.
    pub(crate) fn cool(&mut self, bytes: usize) {
        let mut wanted = bytes;
        while wanted > 0 {
            let Some((start, length)) = self.warm.largest() else { return };
            let (first, last) =
                (start.next_multiple_of(PAGE_BYTES), (start + length) / PAGE_BYTES * PAGE_BYTES);
            if first >= last {
                return;
            }
            // From the end: low addresses stay in use.
            let first = first.max(last.saturating_sub(wanted.next_multiple_of(PAGE_BYTES)));
            let region = self.region_of(start);
            self.warm.remove(start, length);
            self.warm.insert(start, first - start, &region);
            self.warm.insert(last, start + length - last, &region);
            system::release(first, last - first);
            self.cold.insert(first, last - first, &region);
            wanted = wanted.saturating_sub(last - first);
        }
    }

    /// Reserves a region with room for `bytes`: as much again as there is, where the system has it.
    fn reserve(&mut self, bytes: usize) -> Option<()> {
        let reserved: usize = self.regions.iter().map(|region| region.end - region.start).sum();
        let least = bytes.checked_next_multiple_of(PAGE_BYTES)?;
        let generous = least.checked_mul(2)?.max(REGION_BYTES).max(reserved);
        let (reservation, length) = system::reserve(generous)
            .map(|reservation| (reservation, generous))
            .or_else(|| system::reserve(least).map(|reservation| (reservation, least)))?;
        let start = reservation.start.next_multiple_of(PAGE_BYTES);
        let region = Region { start, end: start + length, reservation };
        self.regions.push(region);
        self.cold.insert(start, length, &region);
        Some(())
    }

    fn region_of(&self, address: usize) -> Region {
        *self
            .regions
            .iter()
            .find(|region| (region.start..region.end).contains(&address))
            .expect("every block lies in a region")
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.regions.iter().for_each(|region| system::give_up(region.reservation));
    }
}

/// What the operating system is asked for.
mod system {
    use super::PAGE_BYTES;

    /// Address space as it was handed out, up to a page more than was asked for.
    #[derive(Clone, Copy)]
    pub(super) struct Reservation {
        pub(super) start: usize,
        length: usize,
    }

    #[cfg(target_os = "linux")]
    pub(super) fn reserve(bytes: usize) -> Option<Reservation> {
        let length = bytes.checked_add(PAGE_BYTES)?;
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new anonymous mapping, wherever the system puts it; the advice changes no content.
        unsafe {
            let start = libc::mmap(std::ptr::null_mut(), length, access, kind, -1, 0);
            if start == libc::MAP_FAILED {
                return None;
            }
            libc::madvise(start, length, libc::MADV_HUGEPAGE);
            Some(Reservation { start: start as usize, length })
        }
    }

    #[cfg(target_os = "linux")]
    pub(super) fn release(start: usize, bytes: usize) {
        // SAFETY: whole pages of a region of ours that no block lies in.
        unsafe { libc::madvise(start as *mut libc::c_void, bytes, libc::MADV_DONTNEED) };
    }

    #[cfg(target_os = "linux")]
    pub(super) fn give_up(reservation: Reservation) {
        // SAFETY: the mapping is ours, and the arena that cut blocks from it is gone.
        unsafe { libc::munmap(reservation.start as *mut libc::c_void, reservation.length) };
    }

    #[cfg(not(target_os = "linux"))]
    fn layout(length: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(length, 64).expect("a region's size was checked")
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn reserve(bytes: usize) -> Option<Reservation> {
        let length = bytes.checked_add(PAGE_BYTES).filter(|&length| length <= isize::MAX as usize - 64)?;
        // SAFETY: the size is not zero.
        let start = unsafe { std::alloc::alloc(layout(length)) };
        if start.is_null() { None } else { Some(Reservation { start: start as usize, length }) }
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn release(_start: usize, _bytes: usize) {}

    #[cfg(not(target_os = "linux"))]
    pub(super) fn give_up(reservation: Reservation) {
        // SAFETY: it came from `alloc` with this layout, and the arena that cut blocks from it is gone.
        unsafe { std::alloc::dealloc(reservation.start as *mut u8, layout(reservation.length)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrospeed_tensor::random::RandomKey;

    const MIB: usize = 1 << 20;

    #[test]
    fn neighbours_join_whatever_order_they_come_back_in() {
        let mut arena = Arena::default();
        let blocks: Vec<_> = (0..8).map(|_| arena.take(MIB).unwrap()).collect();
        for at in [3, 0, 7, 1, 5, 2, 6, 4] {
            arena.give(blocks[at], MIB);
        }
        assert_eq!(arena.warm_bytes(), 8 * MIB);
        assert_eq!(arena.take(8 * MIB), Some(blocks[0]), "one range again");
        assert_eq!(arena.warm_bytes(), 0);
    }

    #[test]
    fn the_smallest_range_that_fits_is_cut() {
        let mut arena = Arena::default();
        let [large, wall, small, _end] = [4 * MIB, MIB, 2 * MIB, MIB].map(|bytes| arena.take(bytes).unwrap());
        arena.give(large, 4 * MIB);
        arena.give(small, 2 * MIB);
        assert_eq!(arena.take(MIB), Some(small));
        assert_eq!(arena.take(3 * MIB), Some(large));
        assert!(wall > large);
    }

    #[test]
    fn what_is_cooled_can_be_taken_again() {
        let mut arena = Arena::default();
        let block = arena.take(64 * MIB).unwrap();
        arena.give(block, 64 * MIB);
        arena.cool(48 * MIB);
        assert_eq!(arena.warm_bytes(), 16 * MIB);
        let again = arena.take(64 * MIB).unwrap();
        assert_eq!(again, block, "warm and cold parts are one block");
        // SAFETY: the block is this test's.
        unsafe { again.as_ptr().write_bytes(7, 64 * MIB) };
        arena.give(again, 64 * MIB);
    }

    #[test]
    fn more_than_a_region_finds_another() {
        let mut arena = Arena::default();
        let first = arena.take(2 * MIB).unwrap();
        let second = arena.take(REGION_BYTES).unwrap();
        arena.give(first, 2 * MIB);
        arena.give(second, REGION_BYTES);
        assert_eq!(arena.regions.len(), 2);
        assert_eq!(arena.take(REGION_BYTES), Some(second), "regions do not join");
    }

    #[test]
    fn blocks_never_overlap() {
        let (mut arena, key) = (Arena::default(), RandomKey::new(7, 0));
        let mut held: Vec<(usize, usize)> = Vec::new();
        for turn in 0..4000u64 {
            let draw = key.uniform(turn);
            if draw < 0.55 || held.is_empty() {
                let bytes = 64 * (1 + (key.uniform(turn + 10_000) * 40_000.0) as usize);
                let start = arena.take(bytes).unwrap().as_ptr() as usize;
                assert!(
                    held.iter().all(|&(other, size)| start + bytes <= other || other + size <= start),
                    "turn {turn}"
                );
                held.push((start, bytes));
            } else {
                let (start, bytes) =
                    held.swap_remove((key.uniform(turn + 20_000) * held.len() as f32) as usize % held.len());
                arena.give(NonNull::new(start as *mut u8).unwrap(), bytes);
            }
            if turn % 97 == 0 {
                arena.cool(arena.warm_bytes() / 2);
            }
        }
        for (start, bytes) in held {
            arena.give(NonNull::new(start as *mut u8).unwrap(), bytes);
        }
        let all: usize = arena.regions.iter().map(|region| region.end - region.start).sum();
        assert_eq!(arena.warm.bytes + arena.cold.bytes, all);
    }
}
