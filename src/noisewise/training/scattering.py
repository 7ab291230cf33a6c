"""`Scattering`: Morlet wavelet scattering of pictures, a fixed public map without learned weights.

Order 2 after Bruna and Mallat (2013), with the filters of Oyallon et al. (2018): moduli of wavelet
coefficients at ``scales`` dyadic scales and ``angles`` orientations, averaged over windows of
2^scales pixels.

Averages use a Gaussian, which is separable: smoothing and subsampling are two small products.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from noisewise.checks import positive_int
from noisewise.errors import InvalidValueError

__all__ = ["Scattering"]

_WIDTH = 0.8  # standard deviation of the finest wavelet's envelope, in pixels
_FREQUENCY = 0.75 * math.pi  # centre of the finest wavelet, in radians a pixel
_COPIES = 2  # periodic images of a filter that are summed on each side


class Scattering(nn.Module):
    """Scattering coefficients of order 0, 1 and 2.

    Args:
        height: rows of a picture.
        width: columns.
        scales: J; coefficients are averages over about 2^J pixels.
        angles: L, orientations of the wavelets.

    Raises:
        InvalidValueError: the picture is smaller than the largest wavelet.

    Example:
        >>> Scattering(28, 28)(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 81, 7, 7])
    """

    def __init__(self, height: int, width: int, *, scales: int = 2, angles: int = 8) -> None:
        super().__init__()
        for name, value in (("height", height), ("width", width)):
            positive_int(name, value)
            if value < 2 ** positive_int("scales", scales):
                raise InvalidValueError(name, value, f"must be at least 2^scales = {2**scales}")
        positive_int("angles", angles)
        self.height, self.width, self.scales, self.angles = height, width, scales, angles
        window = 2**scales
        self._sides = tuple(((s + window) // window + 1) * window for s in (height, width))
        for scale in range(scales):
            self._keep(f"wavelets{scale}", self._wavelets(scale))
            for name, size in zip(("rows", "columns"), self._sides, strict=True):
                self._keep(f"{name}{scale}", _smoothing(size, scales, scale))

    @property
    def channels(self) -> int:
        """K, coefficients at each position for each channel of a picture."""
        pairs = self.scales * (self.scales - 1) // 2
        return 1 + self.angles * self.scales + self.angles**2 * pairs

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures [b, C, height, width] -> coefficients [b, C K, height / 2^J, width / 2^J].

        The K coefficients of a channel follow each other, by order, scale and angle.
        """
        padded = self._padded(pictures)[:, :, None]
        spectrum = torch.fft.fft2(padded)
        coefficients = [self._smooth(padded, 0)]
        second_order = []
        for first in range(self.scales):
            moduli = self._moduli(spectrum, first, 0)
            coefficients.append(self._smooth(moduli, first))
            inner = torch.fft.fft2(moduli)[:, :, :, None] if first + 1 < self.scales else None
            paths = [
                self._smooth(self._moduli(inner, second, first), second)
                for second in range(first + 1, self.scales)
                if inner is not None
            ]
            if paths:
                second_order.append(torch.cat(paths, dim=3).flatten(2, 3))
        return torch.cat([*coefficients, *second_order], dim=2).flatten(1, 2)

    def _padded(self, pictures: Tensor) -> Tensor:
        """Mirror the borders up to a multiple of the window."""
        rows, columns = (
            side - size for side, size in zip(self._sides, (self.height, self.width), strict=True)
        )
        top, left = rows // 2, columns // 2
        return nn.functional.pad(pictures, (left, columns - left, top, rows - top), mode="reflect")

    def _moduli(self, spectrum: Tensor, scale: int, level: int) -> Tensor:
        """Moduli of the wavelet coefficients of a scale, sampled at every 2^scale-th pixel.

        Args:
            spectrum: [..., 1, m, n] Fourier transform of signals sampled at every 2^level-th pixel.
            scale: of the wavelets.
            level: of the signals.
        """
        wavelets = _cropped(self.get_buffer(f"wavelets{scale}"), level)
        filtered: Tensor = torch.fft.ifft2(_product(spectrum, wavelets, 2 ** (scale - level)))
        return filtered.abs()

    def _smooth(self, signals: Tensor, level: int) -> Tensor:
        """Local averages of signals at a level, sampled at every 2^J-th pixel, without borders."""
        rows, columns = self.get_buffer(f"rows{level}"), self.get_buffer(f"columns{level}")
        return rows @ signals @ columns.T

    def _wavelets(self, scale: int) -> Tensor:
        """[L, m, n] Fourier transforms of the Morlet wavelets of a scale: real."""
        envelope, frequency = _WIDTH * 2**scale, _FREQUENCY / 2**scale
        slant = 4 / self.angles
        first = max(self.angles // 2 - 1, 0)
        wavelets = []
        for number in range(self.angles):
            angle = (first - number) * math.pi / self.angles
            wave = self._gabor(envelope, angle, frequency, slant)
            bump = self._gabor(envelope, angle, 0.0, slant)
            wavelet = wave - wave.sum() / bump.sum() * bump  # of mean 0
            wavelets.append(torch.fft.fft2(wavelet).real)
        return torch.stack(wavelets).float()

    def _gabor(self, envelope: float, angle: float, frequency: float, slant: float) -> Tensor:
        """A Gaussian, longer across the wave by 1 / slant, times a plane wave; periodic."""
        cosine, sine = math.cos(angle), math.sin(angle)
        total = torch.zeros(self._sides, dtype=torch.complex128)
        shifts = range(-_COPIES, _COPIES + 1)
        for down in shifts:
            for right in shifts:
                y = torch.arange(self._sides[0], dtype=torch.float64) + down * self._sides[0]
                x = torch.arange(self._sides[1], dtype=torch.float64) + right * self._sides[1]
                along = y[:, None] * cosine + x[None, :] * sine
                across = -y[:, None] * sine + x[None, :] * cosine
                decay = -(along**2 + slant**2 * across**2) / (2 * envelope**2)
                total += torch.exp(torch.complex(decay, frequency * along))
        return total * slant / (2 * math.pi * envelope**2)

    def _keep(self, name: str, value: Tensor) -> None:
        self.register_buffer(name, value, persistent=False)


def _smoothing(size: int, scales: int, level: int) -> Tensor:
    """[size / 2^J - 2, size / 2^level] Gaussian averages as a matrix.

    Row k averages around pixel (k + 1) 2^J; the first and the last window are mirrored border.
    """
    envelope = _WIDTH * 2 ** (scales - 1)
    pixels = torch.arange(size, dtype=torch.float64)
    shifts = torch.arange(-_COPIES, _COPIES + 1, dtype=torch.float64)[:, None] * size
    bump = torch.exp(-((pixels + shifts) ** 2) / (2 * envelope**2)).sum(dim=0)
    bump = bump / math.sqrt(2 * math.pi * envelope**2)
    spectrum = _cropped_line(torch.fft.fft(bump).real, level)
    kernel: Tensor = torch.fft.ifft(spectrum).real
    short = size // 2**level
    step = 2 ** (scales - level)
    centres = torch.arange(1, size // 2**scales - 1) * step
    return kernel[(centres[:, None] - torch.arange(short)[None, :]) % short].float()


def _cropped(filters: Tensor, level: int) -> Tensor:
    """Filters [..., m, n] in Fourier space for signals sampled at every 2^level-th pixel."""
    return _cropped_line(_cropped_line(filters, level).mT, level).mT


def _cropped_line(filters: Tensor, level: int) -> Tensor:
    """The low frequencies [..., n / 2^level] of [..., n]; those at the cut are left out."""
    size = filters.shape[-1]
    half = size // 2 ** (level + 1)
    if level == 0:
        return filters
    return torch.cat([filters[..., :half], filters[..., size - half :]], dim=-1)


def _product(spectrum: Tensor, filters: Tensor, factor: int) -> Tensor:
    """The Fourier transform of every ``factor``-th sample of filtered signals.

    Sampling adds up the frequencies that it cannot tell apart. They are added one by one, which
    needs less memory than the product at all frequencies.

    Args:
        spectrum: [..., 1, m, n].
        filters: [L, m, n], real.
        factor: divides m and n.
    """
    rows, columns = (size // factor for size in filters.shape[-2:])
    total: Tensor | None = None
    for row in range(0, rows * factor, rows):
        for column in range(0, columns * factor, columns):
            block = (..., slice(row, row + rows), slice(column, column + columns))
            signal = torch.view_as_real(spectrum[block].contiguous())
            weights = filters[block][..., None]
            total = signal * weights if total is None else total.addcmul_(signal, weights)
    assert total is not None
    return torch.view_as_complex(total.div_(factor**2) if factor > 1 else total)
