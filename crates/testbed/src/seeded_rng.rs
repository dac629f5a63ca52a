//! Reproducible random numbers.

/// A generator of a reproducible sequence of small numbers (xorshift64*). The seed must not be 0.
#[derive(Debug)]
pub struct SeededRng(pub u64);

impl SeededRng {
    /// Returns a number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % n
    }

    /// Returns one of these values.
    pub fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.index(all.len())]
    }

    /// Returns an index below `len`.
    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap()
    }
}
